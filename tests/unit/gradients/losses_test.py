"""Losses in the loop and in the model: rows that meet are refused, all others keep the bound."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

import vestige
from vestige import ConfigError, PrivacyEngine, PrivacyError
from vestige.engine.validation import check_criterion
from vestige.gradients import losses

ROWS, LENGTH, WORDS = 16, 16, 7  # as many positions as rows: no shape tells them apart
NO_NOISE = "no noise: nothing is private, epsilon is infinite"
BOUND = 2.0  # between the gradients of short records in a whole batch and alone


class Tokens(nn.Module):
    """Scores (rows, positions, words); with labels the loss, too, as Hugging Face models do."""

    def __init__(self, own_loss=None):
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.own_loss = own_loss

    def forward(self, tokens, labels=None):
        scores = self.out(self.embed(tokens))
        if labels is None:
            return scores
        return {"loss": self.own_loss(scores, labels), "logits": scores}


def data(ignored=True):
    """One long record, all others with one target each. All are alike, so that their gradients
    add up: a weight that one record moves shows in all others at once."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, WORDS, (1, LENGTH), generator=generator).repeat(ROWS, 1)
    labels = torch.randint(0, WORDS, (1, LENGTH), generator=generator).repeat(ROWS, 1)
    if ignored:
        labels[1:, 1:] = -100
    return tokens, labels


def clipped_sum(records, loss, model=None, reduction="mean", bound=BOUND, **options):
    """The clipped sum of all records in one lot, without noise, and the engine."""
    torch.manual_seed(1)
    model = (model or Tokens)()
    engine = PrivacyEngine(accountant="rdp")
    dataset = records if isinstance(records, list) else TensorDataset(*records)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the self-check was skipped")
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            data_loader=DataLoader(dataset, batch_size=ROWS, collate_fn=options.pop("pad", None)),
            noise_multiplier=0.0,
            max_grad_norm=bound,
            sample_rate=1.0,
            dataset_size=ROWS,
            loss_reduction=reduction,
            clipping="flat",
            **options,
        )
        for batch in loader:
            value = loss(model, *batch)
            engine.backward(value) if value.ndim else value.backward()
            optimizer.step()
            break
    gradient = torch.cat([p.grad.flatten().double() for p in model.parameters()])
    return gradient * ROWS, engine


def ratio(records, loss, drop=0, **options):
    """|q(D) - q(D without a record)| / C."""
    fewer = tuple(t[[i for i in range(len(t)) if i != drop]] for t in records)
    whole, part = (clipped_sum(some, loss, **options)[0] for some in (records, fewer))
    return float((whole - part).norm()) / options.get("bound", BOUND)


def flat(scores, labels, **options):
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), **options)


def by_position(scores, labels):
    return F.cross_entropy(scores.transpose(1, 2), labels, reduction="none")


def masked(scores, labels):
    """A mean by hand over what is not ignored."""
    return by_position(scores, labels).sum() / (labels != -100).sum()


# -- losses that keep the bound -------------------------------------------------------------

MEANS = {
    "a mean over all targets": flat,
    "on transposed scores": lambda s, y: F.cross_entropy(s.transpose(1, 2), y),
    "label smoothing": functools.partial(flat, label_smoothing=0.1),
    "nll_loss": lambda s, y: F.nll_loss(s.log_softmax(-1).transpose(1, 2), y),
    "by hand": masked,
    "by hand, negative": lambda s, y: -(-by_position(s, y)).sum() / (y != -100).sum(),
    "by hand, rows first": lambda s, y: by_position(s, y).sum(0).sum() / (y != -100).sum(),
    "by hand, rows last": lambda s, y: by_position(s, y).sum(1).sum() / (y != -100).sum(),
    "a sum over a count": lambda s, y: flat(s, y, reduction="sum") / (y != -100).sum(),
    "a mean and a smaller one": lambda s, y: flat(s, y) + 0.1 * masked(s, y),
    "the same twice": lambda s, y: (lambda l: l + 0.5 * l)(flat(s, y)),
}


@pytest.mark.parametrize("where", ["in the loop", "in the model"])
@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("bound", [0.02, BOUND, 5.0])
def test_a_mean_over_what_is_not_ignored_is_taken_over_all(name, where, bound):
    """Records that are ignored do not move the weight of the others, at any clip bound."""
    own = MEANS[name]
    if where == "in the model":
        got = ratio(
            data(), lambda m, x, y: m(x, labels=y)["loss"], model=lambda: Tokens(own), bound=bound
        )
    else:
        got = ratio(data(), lambda m, x, y: own(m(x), y), bound=bound)
    assert 0 < got <= 1 + 1e-6


@pytest.mark.parametrize("name", MEANS)
def test_the_mean_over_all_targets_is_that_of_rows_by_themselves(name):
    """A row's loss is the sum over its targets / positions, whatever the other rows are."""
    torch.manual_seed(1)
    twin, expected = Tokens(), 0.0
    for x, y in zip(*data(), strict=True):
        loss = MEANS[name](twin(x[None]), y[None]) * (y != -100).sum() / LENGTH
        gradients = torch.autograd.grad(loss, list(twin.parameters()))
        gradient = torch.cat([g.flatten().double() for g in gradients])
        expected = expected + gradient / max(1.0, float(gradient.norm()))
    got, engine = clipped_sum(data(), lambda m, x, y: MEANS[name](m(x), y), bound=1.0)
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-6)
    assert engine.caveats()[0] == NO_NOISE
    assert not any("loss" in caveat or "PadTo" in caveat for caveat in engine.caveats())


@pytest.mark.parametrize("name", ["a mean over all targets", "by hand"])
def test_without_the_replaced_divisor_the_bound_breaks(name, monkeypatch):
    """The mutant: what the ratios above are there to find."""
    monkeypatch.setattr(losses, "multiply", lambda node, factor: None)
    assert ratio(data(), lambda m, x, y: MEANS[name](m(x), y), bound=BOUND) > 1.5


def test_where_nothing_is_ignored_nothing_changes():
    plain, _ = clipped_sum(data(ignored=False), lambda m, x, y: flat(m(x), y), bound=1.0)
    by_hand, _ = clipped_sum(
        data(ignored=False), lambda m, x, y: by_position(m(x), y).mean(1), bound=1.0
    )
    assert torch.allclose(plain, by_hand, rtol=1e-4, atol=1e-5)


def first(m, x):
    """Scores (rows, words)."""
    return m(x)[:, 0]


ACCEPTED = {
    "cross_entropy": lambda m, x, y: F.cross_entropy(first(m, x), y[:, 0]),
    "probabilities": lambda m, x, y: F.cross_entropy(
        first(m, x), F.one_hot(x[:, 0], WORDS).float()
    ),
    "mse": lambda m, x, y: F.mse_loss(m(x), torch.zeros(len(x), LENGTH, WORDS)),
    "mse, a tensor of weights": lambda m, x, y: (m(x).square() * torch.rand(WORDS)).mean(),
    "l1": lambda m, x, y: F.l1_loss(m(x), torch.zeros(len(x), LENGTH, WORDS)),
    "huber": lambda m, x, y: F.huber_loss(m(x), torch.zeros(len(x), LENGTH, WORDS)),
    "bce with weights": lambda m, x, y: F.binary_cross_entropy_with_logits(
        first(m, x), torch.ones(len(x), WORDS), pos_weight=torch.rand(WORDS)
    ),
    "kl_div": lambda m, x, y: F.kl_div(
        first(m, x).log_softmax(1), torch.full((len(x), WORDS), 1 / WORDS), reduction="batchmean"
    ),
    "gaussian": lambda m, x, y: F.gaussian_nll_loss(
        first(m, x), torch.zeros(len(x), WORDS), torch.ones(len(x), WORDS)
    ),
    "ctc": lambda m, x, y: F.ctc_loss(
        m(x).log_softmax(2).transpose(0, 1),
        x[:, :3].clamp(min=1),
        torch.full((len(x),), LENGTH),
        1 + x[:, 0] % 3,
    ),
    "cosine": lambda m, x, y: F.cosine_embedding_loss(
        first(m, x), m(x)[:, 1], torch.ones(len(x))
    ),
    "one position of each row": lambda m, x, y: F.cross_entropy(
        m(x)[torch.arange(len(x)), x[:, 0]], y[:, 0]
    ),
    "by hand": lambda m, x, y: by_position(m(x), y).sum() / len(x),
    "by hand, two divisors": lambda m, x, y: 0.5 * by_position(m(x), y).sum() / len(x) / LENGTH,
    "over rows first": lambda m, x, y: by_position(m(x), y).mean(0).sum(),
    "accumulated": lambda m, x, y: F.cross_entropy(first(m, x), y[:, 0]) / 4,
    "row means": lambda m, x, y: (
        by_position(m(x), y).sum(1) / (y != -100).sum(1)
    ).mean(),
    "rows in a loop": lambda m, x, y: (lambda out: sum(
        flat(out[i : i + 1, : 1 + x[i, 0]], y[i : i + 1, : 1 + x[i, 0]]).clamp(max=9)
        for i in range(len(out))
    ) / len(out))(m(x)),
    "losses, counted in a loop": lambda m, x, y: torch.stack([
        (row * (t != -100)).sum() / (t != -100).sum()
        for row, t in zip(by_position(m(x), y), y, strict=True)]),
    "counted in a loop": lambda m, x, y: sum(
        row.sum() / (t != -100).sum() for row, t in zip(by_position(m(x), y), y, strict=True)
    ) / len(x),
    "losses, rows in a loop": lambda m, x, y: torch.stack([s[t != -100].logsumexp(1).mean()
        for s, t in zip(m(x), y, strict=True)]),
    "rows stacked again": lambda m, x, y: F.cross_entropy(
        torch.stack([row[0].tanh() for row in m(x)]), y[:, 0]
    ),
    "two terms": lambda m, x, y: torch.stack(
        [F.cross_entropy(first(m, x), y[:, 0]), m(x).square().mean()]
    ).sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_losses_of_rows_by_themselves_are_accepted(name):
    records = data(ignored=False) if name == "rows in a loop" else data()
    for drop, bound in ((0, 0.05), (5, 0.5), (0, 3.0)):
        # Gradients are single precision.
        assert ratio(records, ACCEPTED[name], drop, bound=bound) <= 1 + 1e-4
    _, engine = clipped_sum(records, ACCEPTED[name])
    assert engine.caveats()[0] == NO_NOISE
    assert not any("loss" in caveat or "PadTo" in caveat for caveat in engine.caveats())


# -- losses in which rows meet --------------------------------------------------------------


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.zeros(()))

    def forward(self, scores, y):
        return F.cross_entropy(scores * self.log.exp(), y)


WEIGHTS = torch.tensor([1.0, 1000.0] + [1.0] * (WORDS - 2))
HALF = torch.tensor(0.5)
MEETING = {
    "class-weighted": lambda s, y: F.cross_entropy(s[:, 0], y[:, 0], weight=WEIGHTS),
    "weights for 7 classes": lambda s, y: F.nll_loss(
        s[:, 0].log_softmax(1), y[:, 0], weight=WEIGHTS
    ),
    "class-weighted mean": lambda s, y: F.cross_entropy(s.transpose(1, 2), y, weight=WEIGHTS),
    "trains a tensor": lambda s, y: Temperature()(s[:, 0], y[:, 0]),
    "picked by their content": lambda s, y: by_position(s, y)[y != -100].mean(),
    "no multiple of the 16 rows": lambda s, y: F.cross_entropy(s[y != -100], y[y != -100]),
    "that has no rows": lambda s, y: by_position(s, y)[y != -100].sum() / (y != -100).sum(),
    "no multiple of the": lambda s, y: by_position(s, y)[:5, :1].mean(),
    "applies Pow": lambda s, y: flat(s, y) ** 2,
    "applies Exp": lambda s, y: flat(s, y).exp(),
    "applies Sqrt": lambda s, y: s.square().mean().sqrt(),
    "applies Mul": lambda s, y: (1 - (-flat(s, y)).exp()) * flat(s, y),
    "applies Div": lambda s, y: s.square().mean() / s.abs().mean(),
    "multiplies by a tensor": lambda s, y: flat(s, y) * HALF,
    "divides by a tensor of shape": lambda s, y: flat(s, y) / (y != -100).sum(),
    "sum .Sum. that is not divided": lambda s, y: by_position(s, y).sum(),
    "not divided by the 16 rows": lambda s, y: by_position(s, y).sum() / 27,
    "NllLoss. that is not divided": lambda s, y: flat(s, y, reduction="sum") / 37.0,
    "applies Pow to": lambda s, y: (
        sum(flat(s[i : i + 1], y[i : i + 1]) for i in range(16)) / 16
    ) ** 2,
    "puts single rows together": lambda s, y: sum(
        (s[i, :8, :4] - s[i - 1, :8, :4]).square().mean() for i in range(16)
    ) / 16,
    "single rows together": lambda s, y: torch.stack(
        [(s[i] * s[i - 1]).mean() for i in range(16)]
    ),
    "compares rows": lambda s, y: F.cross_entropy(
        s[:, 0] @ s[:, 1].T, torch.arange(len(s))
    ),
    "product of two outputs .Cdist.": lambda s, y: torch.cdist(s[:, 0], s[:, 1]).mean(),
    "product of two outputs .Pdist.": lambda s, y: F.pdist(s[:, 0])[:ROWS].mean(),
    "Softmax goes over the rows": lambda s, y: s[:, 0].softmax(0).square().mean(),
    "Div spreads": lambda s, y: (s[:, 0] / s[:, 0].std(0)).mean(),
    "applies Logsumexp": lambda s, y: s[:, 0].logsumexp(0).mean(),
    "applies Var": lambda s, y: s[:, 0].var(0).mean(),
    "spreads an output": lambda s, y: (s[:, 0] - s[:1, 0]).square().mean(),
    "Sub spreads": lambda s, y: (s[:, 0] - s[:, 0].mean(0)).square().mean(),
    "NllLoss reduces the rows": lambda s, y: torch.cat([flat(s, y)[None]] * len(s)),
    "Expand spreads an": lambda s, y: (flat(s, y) * len(s)).expand(len(s)),
    "Expand spreads": lambda s, y: flat(s, y).expand(len(s)),
    "divides by a tensor": lambda s, y: by_position(s, y).sum(1) / (y != -100).sum(),
}  # fmt: skip


@pytest.mark.parametrize("said", MEETING)
def test_losses_in_which_rows_meet_are_refused(said):
    with pytest.raises(PrivacyError, match=said):
        clipped_sum(data(), lambda m, x, y: MEETING[said](m(x), y))


IN_THE_MODEL = [
    *("class-weighted", "picked by their content", "no multiple of the 16 rows"),
    *("applies Pow", "applies Mul", "sum .Sum. that is not divided", "not divided by the 16 rows"),
    *("multiplies by a tensor", "divides by a tensor of shape"),
]


@pytest.mark.parametrize("said", IN_THE_MODEL)
def test_losses_in_which_rows_meet_are_refused_in_the_model(said):
    with pytest.raises(PrivacyError, match=said):
        clipped_sum(
            data(),
            lambda m, x, y: m(x, labels=y)["loss"],
            model=lambda: Tokens(MEETING[said]),
        )


@pytest.mark.parametrize(
    "loss",
    [
        lambda s, y: by_position(s, y)[y != -100].mean(),
        lambda s, y: F.cross_entropy(s[y != -100], y[y != -100]),
        lambda s, y: by_position(s, y).masked_select(y != -100).sum() / (y != -100).sum(),
        lambda s, y: s.flatten(0, 1)[(y != -100).flatten().nonzero()[:, 0]].square().mean(),
    ],
)
def test_picked_positions_are_refused_also_if_they_are_a_multiple_of_the_rows(loss):
    tokens, labels = data()
    labels[1, 1] = 1
    assert (labels != -100).sum() == 2 * ROWS
    with pytest.raises(PrivacyError, match="picked by their content"):
        clipped_sum((tokens, labels), lambda m, x, y: loss(m(x), y))


def test_a_loss_of_the_model_that_nobody_differentiates_is_nobodys_business():
    got, _ = clipped_sum(
        data(),
        lambda m, x, y: by_position(m(x, labels=y)["logits"], y).mean(1),
        model=lambda: Tokens(MEETING["class-weighted"]),
    )
    assert got.norm() > 0


def test_a_mean_that_is_declared_as_a_sum_is_refused():
    with pytest.raises(PrivacyError, match=r"mean .NllLoss. that is not multiplied by the 16 rows"):
        clipped_sum(data(), lambda m, x, y: flat(m(x), y), reduction="sum")
    for loss in (
        lambda m, x, y: flat(m(x), y, reduction="sum"),
        lambda m, x, y: flat(m(x), y) * len(x),
        lambda m, x, y: by_position(m(x), y).sum(),
    ):
        assert ratio(data(), loss, reduction="sum") <= 1 + 1e-6


def test_the_trainers_count_of_tokens_is_refused():
    class Counts(Tokens):
        def forward(self, tokens, num_items_in_batch=None):
            return super().forward(tokens)

    with pytest.raises(PrivacyError, match="num_items_in_batch"):
        clipped_sum(
            data(), lambda m, x, y: flat(m(x, num_items_in_batch=9), y), model=lambda: Counts()
        )


@pytest.mark.parametrize("name", ACCEPTED)
def test_lots_of_two_rows_and_of_one_agree(name):
    """Shapes of one or two say the least; what is understood must not depend on that."""
    records = tuple(t[:2] for t in data(ignored=name != "rows in a loop"))
    for drop in (0, 1):
        assert ratio(records, ACCEPTED[name], drop, bound=2.0) <= 1 + 1e-4


def test_a_refused_loss_leaves_the_batch_for_a_better_one():
    tokens, labels = data()
    model = Tokens()
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(tokens, labels), batch_size=ROWS),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=1.0,
    )
    x, y = next(iter(loader))
    values = by_position(model(x), y)
    with pytest.raises(PrivacyError, match="applies Log"):
        values.mean().log().backward()
    engine.backward(values.mean(1))
    optimizer.step()
    assert engine.released == 1 and engine.ledger.steps == 1
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_loss_that_cannot_be_read_is_a_caveat():
    class Unknown(torch.autograd.Function):
        @staticmethod
        def forward(ctx, scores):
            ctx.shape, ctx.name, ctx.variable = scores.shape, "mine", None
            return scores.mean()

        @staticmethod
        def backward(ctx, g):
            return g.expand(ctx.shape) / ctx.shape.numel()

    for loss in (
        lambda m, x, y: Unknown.apply(m(x)),
        lambda m, x, y: F.cross_entropy(first(m, x), y[:, 0]).add(Unknown.apply(m(x))),
    ):
        _, engine = clipped_sum(data(), loss)
        assert any("could not be read" in caveat for caveat in engine.caveats())
        stated = engine.statement(1e-5)
        assert any("could not be read" in caveat for caveat in stated["caveats"])


# -- the watch itself -----------------------------------------------------------------------


def test_blocks_of_the_loop_close_as_if_nobody_watched():
    """A mode that is open around the model alone, and torch.device, which insists on the bottom."""

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def loss(m, x, y):
        with Mode(), torch.device("cpu"):
            scores = m(x)
        with torch.device("cpu"):
            return F.cross_entropy(scores[:, 0], y[:, 0], weight=WEIGHTS)

    with pytest.raises(PrivacyError, match="class-weighted"):
        clipped_sum(data(), loss)
    plain, _ = clipped_sum(data(), ACCEPTED["cross_entropy"])
    assert plain.norm() > 0
    assert not torch.overrides._get_current_function_mode_stack()


def test_losses_of_two_engines_are_told_apart():
    """Each engine reads the loss of its own model, also while both have a batch in hand."""
    tokens, labels = data()
    made = []
    for rows in (ROWS, ROWS // 2):
        model, engine = Tokens(), PrivacyEngine(accountant="rdp")
        made.append((engine, *engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(tokens[:rows], labels[:rows]), batch_size=rows),
            noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=1.0,
        )))  # fmt: skip
    batches = [next(iter(loader)) for _, _, _, loader in made]
    both = [flat(m(x), y) for (_, m, _, _), (x, y) in zip(made, batches, strict=True)]
    for loss in both:
        loss.backward()
    for engine, _, optimizer, _ in made:
        optimizer.step()
        assert engine.released == 1
        assert not any("read" in caveat for caveat in engine.caveats())
    assert not torch.overrides._get_current_function_mode_stack()


# -- criterions that are handed over --------------------------------------------------------


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = nn.ModuleDict({"loss": inner})

    def forward(self, scores, y):
        return self.inner["loss"](scores, y)


def closure(inner):
    return lambda scores, y: inner(scores, y)


CRITERIONS = {
    "wrapped": (Wrapped(nn.CrossEntropyLoss(weight=WEIGHTS)), "class weights"),
    "twice": (Wrapped(Wrapped(nn.NLLLoss(weight=WEIGHTS))), "class weights"),
    "ignored": (Wrapped(nn.CrossEntropyLoss(ignore_index=0)), "ignore_index=0"),
    "partial": (functools.partial(F.cross_entropy, weight=WEIGHTS), "class weights"),
    "partial, ignored": (functools.partial(F.nll_loss, ignore_index=0), "ignore_index=0"),
    "closure": (closure(nn.CrossEntropyLoss(weight=WEIGHTS)), "class weights"),
    "method": (Wrapped(nn.CrossEntropyLoss(weight=WEIGHTS)).forward, "class weights"),
    "trained": (Temperature(), "trains parameters of its own"),
    "trained inside": (Wrapped(Temperature()), "trains parameters of its own"),
    "trained tensor": (closure(functools.partial(torch.mul, torch.ones(3, requires_grad=True))),
                       "trains a tensor"),
    "adaptive": (nn.AdaptiveLogSoftmaxWithLoss(8, 20, [4]), "trains parameters of its own"),
}  # fmt: skip


@pytest.mark.parametrize("name", CRITERIONS)
def test_a_criterion_is_walked_to_its_parts(name):
    criterion, said = CRITERIONS[name]
    with pytest.raises(ConfigError, match=said):
        clipped_sum(data(), ACCEPTED["cross_entropy"], criterion=criterion)


def test_harmless_criterions_pass():
    model = Tokens()
    for criterion in (
        Wrapped(nn.CrossEntropyLoss()),
        Wrapped(nn.CrossEntropyLoss(weight=WEIGHTS, reduction="none")),
        nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)),
        functools.partial(F.cross_entropy, label_smoothing=0.1),
        Temperature().requires_grad_(False),
        closure(model),
    ):
        check_criterion(criterion, "mean", model)


# -- padding --------------------------------------------------------------------------------


class Pooled(nn.Module):
    """A mean over the padded length, as in many text classifiers."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, 8, padding_idx=0), nn.Linear(8, 3)

    def forward(self, tokens):
        return self.out(self.embed(tokens).mean(1))


def texts():
    """One long text and many short ones, with a class each."""
    generator = torch.Generator().manual_seed(2)
    lengths = [60] + [3 + i % 3 for i in range(ROWS)]
    return [
        (torch.randint(1, WORDS, (n,), generator=generator), i % 3) for i, n in enumerate(lengths)
    ]


def to_the_longest(rows):
    return pad_sequence([r for r, _ in rows], batch_first=True), torch.tensor([k for _, k in rows])


def class_losses(m, x, y):
    return 100 * F.cross_entropy(m(x), y, reduction="none")


def test_padding_to_a_public_length_keeps_the_bound():
    """The same records, padded to the longest of the lot, move all others."""

    def moved(pad):
        whole, _ = clipped_sum(texts(), class_losses, model=Pooled, pad=pad, bound=1.0)
        part, _ = clipped_sum(texts()[1:], class_losses, model=Pooled, pad=pad, bound=1.0)
        return float((whole - part).norm())

    assert moved(vestige.PadTo({0: 64})) <= 1 + 1e-6
    assert moved(to_the_longest) > 1.5


def test_shapes_that_follow_the_lot_are_a_caveat_and_in_the_statement():
    for pad, padded in ((to_the_longest, True), (vestige.PadTo({0: 64}), False)):
        model = Pooled()
        engine = PrivacyEngine(accountant="rdp", noise_seed=3)
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(texts(), batch_size=4, collate_fn=pad),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            max_physical_batch_size=3,
        )
        for x, y in loader:
            engine.backward(class_losses(model, x, y))
            optimizer.step()
        assert any("PadTo" in caveat for caveat in engine.caveats()) == padded
        stated = engine.statement(1e-5)["caveats"]
        assert any("padded to the longest" in caveat for caveat in stated) == padded


def test_pad_to_fills_cuts_and_refuses():
    rows = [
        {"ids": torch.tensor([1, 2, 3]), "labels": [4, 5], "kind": 1},
        {"ids": torch.tensor([6]), "labels": [7], "kind": 0},
    ]
    pad = vestige.PadTo({"ids": 3, "labels": 4}, value={"labels": -100})
    batch = pad(rows)
    assert batch["ids"].tolist() == [[1, 2, 3], [6, 0, 0]]
    assert batch["labels"].tolist() == [[4, 5, -100, -100], [7, -100, -100, -100]]
    assert batch["kind"].tolist() == [1, 0]
    images = vestige.PadTo(3, value=-1)([torch.ones(2, 2), torch.ones(3, 2)])
    assert images[0].tolist() == [[1, 1], [1, 1], [-1, -1]]
    with pytest.raises(ConfigError, match="more than the 2 positions of PadTo in field 'ids'"):
        vestige.PadTo({"ids": 2})(rows)
    cut = vestige.PadTo({"ids": 2, "labels": 2}, truncate=True)(rows)
    assert cut["ids"].tolist() == [[1, 2], [6, 0]]
    for length in (0, -1, 2.5, True, {"ids": 0}):
        with pytest.raises(ConfigError, match="whole number above 0"):
            vestige.PadTo(length)
