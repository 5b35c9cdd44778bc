"""The errors Vestige raises. Each message names the value, the rule it breaks and the remedy."""


class VestigeError(Exception):
    """Base of every error that Vestige raises on purpose."""


class ConfigError(VestigeError, ValueError):
    """A setting is out of range, unknown, or contradicts another one."""


class PrivacyError(VestigeError, RuntimeError):
    """Going on would break the privacy guarantee, so the operation was refused."""


class UnsupportedModel(PrivacyError):  # noqa: N818 - reads as a statement about the model
    """The model does something for which no per-example gradient can be given."""
