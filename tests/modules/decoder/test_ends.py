"""Modules that return their own loss: encoders of others, and what is said of them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from autoshard.cost.compute import seen_share
from autoshard.errors import InputError
from autoshard.graph.kinds.attention import Attend
from autoshard.graph.written import parse_lines
from autoshard.modules.decoder.reading import read_decoder
from autoshard.spec.kernels import load_kernels
from tests.modules.training.own_decoders import LENGTH, Encoder, EncoderLayer, Gpt, GptLayer, Smoothed, biased, talking
from tests.slower import rest_is_slow

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
PLANNED = "its own loss is planned as the cross-entropy of its logits"
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 48,
    "max_position_embeddings": 24, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip


class Masked(nn.Module):
    """An encoder of transformers that tells the words which it hides."""

    def __init__(self, kind: str, **more: Any) -> None:
        super().__init__()
        import transformers

        encoder: Any = getattr(transformers, f"{kind}ForMaskedLM")
        self.net = encoder(encoder.config_class(**{**_SIZES, **more}))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = (7 * tokens + torch.arange(tokens.shape[1], device=tokens.device)) % 4 == 0
        logits = self.net(input_ids=torch.where(hidden, 3, tokens)).logits
        return functional.cross_entropy(logits.flatten(0, 1), torch.where(hidden, tokens, -100).flatten())


def bert() -> nn.Module:
    return Masked("Bert")


def modern_bert() -> nn.Module:
    special = {f"{name}_token_id": 1 for name in ("cls", "bos", "sep", "eos")}
    return Masked("ModernBert", local_attention=8, global_attn_every_n_layers=2, **special)


def electra() -> nn.Module:
    return Masked("Electra", embedding_size=32)


def roberta() -> nn.Module:
    return Masked("Roberta", type_vocab_size=1)


ENCODERS: dict[str, tuple[Callable[[], nn.Module], Attend]] = {
    "BERT": (bert, Attend(sees_all=True)),
    "ModernBERT": (modern_bert, Attend(windows=((5, 2), (None, 1)), sees_all=True)),
    "ELECTRA": (electra, Attend(sees_all=True)),
    "RoBERTa": (roberta, Attend(sees_all=True)),
    "written here": (Encoder, Attend(sees_all=True)),
}


@pytest.mark.parametrize("name", rest_is_slow(ENCODERS, 0, 1))
def test_encoders_are_read_with_all_their_weights_and_attention_to_both_sides(name: str):
    make, attend = ENCODERS[name]
    module = make()
    model = read_decoder(module, LENGTH)
    assert model.traced and PLANNED in model.traced.unlifted
    assert model.traced.num_parameters == sum(parameter.numel() for parameter in module.parameters())
    (found,) = (op.kind for op in parse_lines(model.traced.layer) if op.name == "attend")
    assert found == attend


def test_a_decoder_with_a_loss_of_its_own_is_the_one_without():
    with_loss, plain = (read_decoder(module, LENGTH) for module in (Smoothed(), Gpt()))
    assert with_loss.traced and plain.traced
    assert (with_loss.traced.embed, with_loss.traced.layer, with_loss.traced.head) == (
        plain.traced.embed, plain.traced.layer, plain.traced.head
    )  # fmt: skip
    assert with_loss.traced.unlifted == (*plain.traced.unlifted, PLANNED)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("by_hand", [True, False])
def test_weights_that_are_added_to_scores_hide_nothing(is_causal: bool, by_hand: bool):
    model = read_decoder(biased(is_causal=is_causal, by_hand=by_hand), LENGTH)
    assert model.traced
    (kind,) = (op.kind for op in parse_lines(model.traced.layer) if op.name == "attend")
    assert kind == Attend(sees_all=not is_causal, biased=True, unfused=by_hand)
    assert seen_share(Attend(biased=True), 12, 1, 1) == seen_share(Attend(unfused=True), 12, 1, 1) == 1


def test_attention_that_mixes_heads_is_planned_by_all_of_its_work():
    module = talking()
    model = read_decoder(module, LENGTH)
    assert model.traced and not [note for note in model.traced.unlifted if "FLOPs" in note]
    assert model.traced.num_parameters == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("table", ["torch_engine", "torch_engine_gpu", "neuron_native"])
def test_attention_that_is_written_out_holds_its_scores(table: str):
    flash, by_hand = (load_kernels(table).entry("attend", biased=True, unfused=unfused) for unfused in (False, True))
    assert flash and by_hand and by_hand.saves and not by_hand.skips_masked
    assert by_hand.saves.count("scores") > (flash.saves or ()).count("scores")


@pytest.mark.parametrize("table", ["torch_engine", "torch_engine_gpu"])
def test_attention_that_adds_numbers_is_no_flash_kernel(table: str):
    plain, biased_kernel = (load_kernels(table).entry("attend", biased=biased) for biased in (False, True))
    assert plain and biased_kernel and plain.skips_masked and not biased_kernel.skips_masked
    assert biased_kernel.score_bytes.forward > plain.score_bytes.forward


class OfClasses(Encoder):
    """Tells what a whole sequence is."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.out(self.norm(x).mean(1)), tokens[:, 0])


class Short(Encoder):
    """Tells all words but the last."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.out(self.norm(x[:, :-1])).mT, tokens[:, 1:])


class HalfBlind(Encoder):
    """Its second layer sees only what comes before a token."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([EncoderLayer(0.0), GptLayer(0.0)])


def test_what_is_no_loss_of_tokens_is_refused():
    with pytest.raises(InputError, match=r"module: makes its loss of no logits of each token, \[batch, sequence, voc"):
        read_decoder(OfClasses(), LENGTH)
    with pytest.raises(InputError, match=rf"makes its loss of \[batch {LENGTH - 1} 48\], not of the logits of each"):
        read_decoder(Short(), LENGTH)
    with pytest.raises(InputError, match=r"layers\.1: does not see what comes after a token, and layers\.0 does\. All"):
        read_decoder(HalfBlind(), LENGTH)


@pytest.mark.parametrize("window", [None, 1, 3, 40])
def test_the_share_of_pairs_seen_is_that_of_the_mask(window: int | None):
    kind, where = Attend(window=window, sees_all=True), np.arange(12)
    assert seen_share(kind, 12, 1, 1) == pytest.approx(kind.visible(where, where).mean())
