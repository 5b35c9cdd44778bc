"""What docs/results.md says about SMA: sentences made from rows, for results_test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from scipy import stats

from tests.support.measured import (
    DATA,
    EPSILONS,
    FAIR,
    LAYERS,
    OWN,
    SETS,
    SMA,
    WORDS,
    definition,
    differences,
    found,
    has,
    mean,
    printed,
    rate_of,
    rows,
    runs,
    smallest_seen,
    up,
)


def table_2_of_sma() -> Iterator[str]:
    ours = {**SMA, "alpha": 0.7, "window": 4, "interval": [2.0, 6.0]}
    accuracy, other = found(**ours), found(**LAYERS, method="dp-sgd")
    paper = printed("sma-tab2", "SMA-DP-SGD"), printed("sma-tab2", "DP-SGD (SMA, beta 1)")
    yield (
        f"| SMA {paper[0]['accuracy']:.4f}, DP-SGD {paper[1]['accuracy']:.4f} (table 2) | not "
        f"found | our reading: {mean(accuracy):.4f} and {mean(other):.4f} |"
    )
    (one,) = set(found("epsilon_marginal", **ours).values())
    (every,) = set(found("epsilon", **ours).values())
    yield f"| {up(one)}; all that is released: {up(every)} |"
    yield "beta 0.95, alpha 0.7, window 4 and the interval [2, 6] are the paper's"
    (slow,) = found("diagnostics", **ours | {"ema": 0.1}).values()
    yield f"With 0.1 the ratio is {slow['mean']['memory_ratio']:.4f} (window 4, one seed"


def table_3_of_sma() -> Iterator[str]:
    deep = {**SMA, "alpha": 0.9, "window": 8}
    depths, ratios, told = [], [], definition("sma-tab3")["arm"]
    for arm in told:
        memories = found("diagnostics", **deep, interval=arm["settings"]["interval"]).values()
        depths.append(mean([memory["mean"]["depth"] for memory in memories]))
        ratios.append(mean([memory["mean"]["memory_ratio"] for memory in memories]))
    theirs = [arm["paper"]["depth"] for arm in told]
    near = sum(abs(a - b) < 0.02 for a, b in zip(depths, theirs, strict=True))
    ours, paper = (", ".join(f"{depth:.2f}" for depth in some) for some in (depths, theirs))
    yield (
        f"The depths of table 3 are {ours} where {paper} are printed: {WORDS[near]} of "
        f"{WORDS[len(told)]} within 0.02."
    )
    yield f"(table 3) | [{WORDS[near]} of {WORDS[len(told)]} met](#smas-exponents-and-a-cnn) |"
    theirs = [arm["paper"]["memory_ratio"] for arm in told]
    yield (
        f"table 3, printed as {min(theirs):.4f} to {max(theirs):.4f}, are {min(ratios):.4f} to "
        f"{max(ratios):.4f} here, with gamma_ema {deep['ema']}."
    )
    right = found(**deep, interval=[4.0, 6.0])
    wrong = found(**deep | {"method": "sma-shuffled", "interval": [4.0, 6.0]})
    p = stats.ttest_1samp(differences(right, wrong), 0).pvalue
    unseen = smallest_seen(right, wrong, len(definition("sma-shuffled")["arm"]) - 1)
    ends = f"right layers {mean(right):.4f}, wrong ones {mean(wrong):.4f}"
    yield f"| no effect seen | {ends} (p {p:.2f}, three seeds) |"
    runs_of = found("diagnostics", **deep, interval=[4.0, 6.0]).values()
    layers = zip(*(lambdas for memory in runs_of for lambdas in memory["tempering"]), strict=True)
    first, second, third = (mean(layer) for layer in layers)
    yield (
        "wrong layers, the exponents make no difference that three seeds could see: "
        f"{mean(wrong):.4f} beside SMA's {mean(right):.4f} (p {p:.2f}; only {unseen:.3f} or more "
        "would have been seen). That is at K 8 and [4, 6], where all layers are tempered (lambda "
        f"{first:.2f}, {second:.2f} and {third:.2f} on average)."
    )
    assert len(right) == len(wrong) == 3


def table_3_of_sma_with_other_constants() -> Iterator[str]:
    told, paper = (definition(name)["arm"] for name in ("sma-tab3-constants", "sma-tab3"))
    deep = {**SMA, "alpha": 0.9, "window": 8}
    yield "With other constants, seed 0 alone ([sma-tab3-constants]):"
    yield "| gamma_ema | c_lambda | depths at the six intervals | memory ratios |"
    yield f"| printed | | {listed(paper, 'depth', 2)} | {listed(paper, 'memory_ratio', 4)} |"
    spread, missed = [], {}
    for ema, tempering in constants_of(told):
        own = [
            {"paper": memory_of(deep | arm["settings"] | {"ema": ema, "tempering": tempering})}
            for arm in paper
        ]
        yield (
            f"| {ema:g} | {tempering:g} | {listed(own, 'depth', 2)} | "
            f"{listed(own, 'memory_ratio', 4)} |"
        )
        ratios = [arm["paper"]["memory_ratio"] for arm in own]
        spread.append(max(ratios) / min(ratios))
        pairs = zip(own, paper, strict=True)
        far = max(abs(a["paper"]["depth"] - b["paper"]["depth"]) for a, b in pairs)
        missed[tempering] = max(far, missed.get(tempering, 0.0))
    ratios = [arm["paper"]["memory_ratio"] for arm in paper]
    yield (
        f"differ by a factor of {max(spread):.1f} at most by interval, where the printed ones "
        f"differ by {max(ratios) / min(ratios):.1f}"
    )
    apart = 0.0  # the seeds of sma-tab3, in depth
    for arm in paper:
        seeds = [
            m["mean"]["depth"] for m in found("diagnostics", **deep | arm["settings"]).values()
        ]
        apart = max(apart, max(seeds) - min(seeds))
    one, half, two = (missed[tempering] for tempering in (1.0, 0.5, 2.0))
    yield (
        f"They miss the printed ones by up to {one:.2f} with c_lambda 1, {half:.2f} with 0.5 and "
        f"{two:.2f} with 2; seeds alone are up to {apart:.2f} apart."
    )


def listed(arms: list[dict[str, Any]], name: str, digits: int) -> str:
    return ", ".join(f"{arm['paper'][name]:.{digits}f}" for arm in arms)


def constants_of(arms: list[dict[str, Any]]) -> dict[tuple[float, float], None]:
    """Pairs of gamma_ema and c_lambda, first those of sma-tab3, each once."""
    settings = [arm["settings"] for arm in arms]
    pairs = ((s.get("ema", 0.3), s.get("tempering", 1.0)) for s in settings)
    return dict.fromkeys([(0.3, 1.0), *pairs])


def memory_of(facts: dict[str, Any]) -> dict[str, float]:
    """Mean depth and ratio of the memory of seed 0."""
    means: dict[str, float] = found("diagnostics", seeds=[0], **facts)[0]["mean"]
    return means


def sma_with_its_own_constants_tuned() -> Iterator[str]:
    """The eight triples of beta, window and interval beside DP-SGD per layer, at one rate."""
    arm = definition("sma-tuned")["fair"]["arm"][1]
    names, choices = list(arm["choices"]), list(arm["choices"].values())
    (rate,) = arm["rates"]
    cell = {**FAIR, "dataset": "cifar10", "target_epsilon": 3.0, "clipping": "per_layer"}
    cell |= {"epochs": 250, "lr": rate}
    tuning = cell | {"role": "tuning", "test_range": None}
    plain = {"method": "dp-sgd"}
    triples = [
        {"method": "sma", "alpha": 0.7} | dict(zip(names, some, strict=True))
        for some in itertools.product(*choices)
    ]
    known = [runs([100], **tuning | one)[100] for one in triples]
    order = [(-row["final_accuracy"], row["final_loss"], i) for i, row in enumerate(known)]
    best = triples[min(order)[-1]]
    ours, theirs = found(**cell | best), found(**cell | plain)
    p = stats.ttest_1samp(differences(ours, theirs), 0).pvalue
    accuracy = [row["final_accuracy"] for row in known]
    (other,) = found(seeds=[100], **tuning | plain).values()
    betas, windows, intervals = choices
    gap = differences(ours, theirs)
    ends = stats.ttest_1samp(gap, 0).confidence_interval(0.95)
    whole = cell | plain | {"clipping": "flat"}
    yield (
        f"SMA's beta, window and interval are tuned as FO's are ([sma-tuned], rate {rate}): "
        f"{WORDS[len(triples)]} triples of beta {betas[0]} or {betas[1]}, window {windows[0]} or "
        f"{windows[1]} and {shown(intervals[0])} or {shown(intervals[1])}. They have "
        f"{min(accuracy):.4f} to {max(accuracy):.4f} on the validation images, and DP-SGD per "
        f"layer has {other:.4f} there. The best triple, beta {best['beta']}, window "
        f"{best['window']} and {shown(best['interval'])}, ends at {mean(ours):.4f} where DP-SGD "
        f"per layer ends at {mean(theirs):.4f} and DP-SGD that clips the whole gradient at "
        f"{mean(found(**whole)):.4f} ({WORDS[len(ours)]} seeds)."
    )
    yield (
        f"SMA less DP-SGD per layer is {mean(gap):+.4f}, with a 95 % interval of [{ends.low:.4f}, "
        f"{ends.high:.4f}] (p {p:.2f})"
    )


def shown(interval: list[float]) -> str:
    return f"[{interval[0]:g}, {interval[1]:g}]"


def beside_the_whole_gradient() -> Iterator[str]:
    """SMA, and DP-SGD with its clipping, less DP-SGD that clips the whole gradient."""
    below: dict[str, list[list[float]]] = {data: [] for data in DATA["sma"]}
    layers = []
    for data, epsilon in itertools.product(DATA["sma"], EPSILONS):
        cell = {**FAIR, "dataset": data, "target_epsilon": epsilon}
        cell["epochs"] = 250 if data == "cifar10" else 100
        whole = cell | {"method": "dp-sgd", "clipping": "flat"}
        flat = found(**whole, lr=chosen_rate(whole))
        below[data].append(differences(found(**cell, **OWN["sma"]), flat))
        if data == "cifar10":
            rate = rate_of("sma", {**cell, **OWN["sma"]})
            each = found(**cell, method="dp-sgd", clipping="per_layer", lr=rate)
            layers.append(-mean(differences(each, flat)))
    gaps = {data: [-mean(some) for some in each] for data, each in below.items()}
    p = [stats.ttest_1samp(some, 0).pvalue for some in below["cifar10"]]
    told, other = (", ".join(f"{gap:.4f}" for gap in some) for some in (gaps["cifar10"], layers))
    assert min(gaps["mnist"]) > 0 > max(gaps["cifar100"]) and max(p) < 0.05
    yield (
        f"On CIFAR-10 SMA is below it, by {told} at the three epsilons (five old seeds; p "
        f"{', '.join(f'{value:.2f}' for value in p)}, before any correction). DP-SGD per layer is "
        f"below it as much, by {other}: the clipping does that, not the memory. On CIFAR-100 SMA "
        f"is above it, by {-max(gaps['cifar100']):.4f} to {-min(gaps['cifar100']):.4f}, on MNIST "
        f"below, by {min(gaps['mnist']):.4f} to {max(gaps['mnist']):.4f} ([sma-tab2], [sma-fig2])."
    )


def chosen_rate(cell: dict[str, Any]) -> float:
    """The rate of the final runs that have these facts and are those of the fair columns."""
    tables = ("fo-tab3", "fo-fig1", "sma-fig2")
    own = [row for row in rows() if has(row, cell) and row["experiment"] in tables]
    (rate,) = {row["lr"] for row in own if row["label"] == "DP-SGD"}
    return float(rate)


def three_estimators() -> Iterator[str]:
    shown = {"hill": "Hill, half of the eigenvalues", "clauset": "Clauset"}
    means = {}
    for name in ("hill", "clauset", "weightwatcher"):
        (row,) = (r for r in rows() if has(r, {"model": "resnet18", "estimator": name}))
        memory = row["diagnostics"]
        groups = zip(memory["groups"], zip(*memory["tempering"], strict=True), strict=True)
        tempered = [group for group, lambdas in groups if max(lambdas) > 0]
        assert (tempered == ["out"]) == (name == "hill")
        facts = row["diagnostics"]["mean"]
        means[name] = facts["rho"]
        told = f"{facts['rho']:.2f} | {facts['tempering']:.3f} | {facts['depth']:.2f}"
        yield f"| {shown.get(name, name)} | {told} | {row['final_accuracy']:.4f} |"
    assert 2 < means.pop("hill") < 6 < min(means.values())
    yield "With Hill's on half of the eigenvalues the stages lie within [2, 6] and only the head is"


def sma_with_a_cnn() -> Iterator[str]:
    cnn = {**SETS, "model": "cnn", "dataset": "cifar10", "clipping": "per_layer", "epochs": 100}
    wide = [found(**cnn, method=m, group_noise_multiplier=1.1) for m in ("sma", "dp-sgd")]
    fair = {**cnn, "role": "final", "target_epsilon": 3.0}
    ours, theirs = (found(**fair, method=method) for method in ("sma", "dp-sgd"))
    p = stats.ttest_1samp(differences(ours, theirs), 0).pvalue
    yield (
        f"SMA ends at {mean(wide[0]):.4f} and DP-SGD per layer at {mean(wide[1]):.4f} in the "
        f"protocol of table 2 ({WORDS[len(wide[0])]} seeds), and at {mean(ours):.4f} and "
        f"{mean(theirs):.4f} at epsilon 3 with tuned rates ({WORDS[len(ours)]} seeds, p {p:.2f})."
    )


CLAIMS = (
    table_2_of_sma,
    table_3_of_sma,
    table_3_of_sma_with_other_constants,
    sma_with_its_own_constants_tuned,
    beside_the_whole_gradient,
    three_estimators,
    sma_with_a_cnn,
)
