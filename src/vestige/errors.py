"""The errors Vestige raises. Each message names the value, the rule it breaks and the remedy."""


class VestigeError(Exception):
    """Base of every error that Vestige raises on purpose."""


class ConfigError(VestigeError, ValueError):
    """A setting is out of range, unknown, or contradicts another one."""


class PrivacyError(VestigeError, RuntimeError):
    """Going on would break the privacy guarantee, so the operation was refused."""


class BudgetExhausted(PrivacyError):  # noqa: N818 - reads as a statement about the budget
    """The next lot would cost more than `max_epsilon` allows. It was not drawn from."""


class StorageError(VestigeError, OSError):
    """Something that must be on disk before the run goes on could not be written."""


class UnsupportedModel(PrivacyError):  # noqa: N818 - reads as a statement about the model
    """The model does something for which no per-example gradient can be given."""
