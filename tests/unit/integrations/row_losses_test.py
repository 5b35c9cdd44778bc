"""The losses of rows are those that the models themselves give for one row at a time."""

from __future__ import annotations

import pytest
import torch

from tests.support.trainers import LENGTH, SIZES, VOCABULARY, Sentences, seeded
from vestige import ConfigError
from vestige.integrations.row_losses import logits_in, row_losses

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install -e '.[hf]'")
BERT = {"vocab_size": VOCABULARY, "intermediate_size": 24, "max_position_embeddings": LENGTH}
LLAMA = {"vocab_size": VOCABULARY, "intermediate_size": 24, "num_key_value_heads": 1}


def several(labels):
    return torch.nn.functional.one_hot(labels, 3).float()


KINDS = {
    "BertForSequenceClassification": (BERT | {"num_labels": 2}, False, lambda y: y),
    "regression": (BERT | {"num_labels": 1}, False, lambda y: y.float() - 0.3),
    "multi_label": (
        BERT | {"num_labels": 3, "problem_type": "multi_label_classification"},
        False,
        several,
    ),
    "BertForTokenClassification": (BERT | {"num_labels": VOCABULARY}, True, lambda y: y),
    "BertForMaskedLM": (BERT, True, lambda y: y),
    "LlamaForCausalLM": (LLAMA, True, lambda y: y),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_has_the_loss_that_it_has_alone(kind):
    config, tokens, change = KINDS[kind]
    name = kind if "For" in kind else "BertForSequenceClassification"
    built = (transformers.BertConfig if "Bert" in name else transformers.LlamaConfig)(
        **config, **SIZES
    )
    model = seeded(lambda: getattr(transformers, name)(built)).eval()
    batch = torch.utils.data.default_collate(list(Sentences(6, tokens=tokens)))
    labels = change(batch.pop("labels"))
    with torch.no_grad():
        each = row_losses(model.loss_type, logits_in(model(**batch)), labels)
        assert each.shape == (6,)
        for i in range(6):
            row = {name: values[i : i + 1] for name, values in batch.items()}
            alone = model(**row, labels=labels[i : i + 1]).loss
            assert each[i] == pytest.approx(float(alone), rel=1e-5)


def test_a_row_without_labels_has_no_loss_and_others_keep_theirs():
    logits = torch.randn(3, 4, 5, requires_grad=True)
    labels = torch.tensor([[-100] * 4, [1, -100, 2, -100], [0, 1, 2, 3]])
    losses = row_losses("ForTokenClassification", logits, labels)
    assert float(losses[0].detach()) == 0
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert not gradient[0].any() and not gradient[1, 1].any() and gradient[1, 0].any()
    moved = labels.clone()
    moved[2] = -100
    again = row_losses("ForTokenClassification", logits, moved)
    assert torch.equal(losses[:2], again[:2])


def test_what_has_no_known_loss_names_the_remedy():
    with pytest.raises(ConfigError, match=r"loss_type='ForCTC'.* compute_loss_func=f"):
        row_losses("ForCTC", torch.zeros(2, 3), torch.zeros(2).long())
    with pytest.raises(ConfigError, match="labels of shape"):
        row_losses("ForMaskedLM", torch.zeros(2, 3, 4), torch.zeros(2, 5).long())
    with pytest.raises(ConfigError, match="returned no logits but tuple"):
        logits_in((torch.zeros(2),))
