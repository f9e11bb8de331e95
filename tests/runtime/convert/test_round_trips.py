"""Every form is left as it was entered, bit by bit; what is exported gives transformers the same logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from autoshard.engine.nxd.shards import FAMILIES
from autoshard.runtime.convert.converting import form_of
from autoshard.spec.model_catalogue import load_model, model_names
from tests.ranks.cases import plan_of
from tests.runtime.convert.cases import converted, cut, read, reduced, same, written
from tests.runtime.convert.test_opening import module_of
from tests.slower import rest_is_slow
from tests.small_configs import SMALL_FAMILIES

transformers: Any = pytest.importorskip("transformers")

LAYOUTS = (
    "tp=1,pp=1,dp=1", "tp=2,pp=2,dp=1", "tp=4,pp=1,dp=2,zero=3", "tp=2,pp=4,dp=1", "tp=1,pp=2,dp=2", "tp=8,pp=1,dp=1",
)  # fmt: skip
CUTS = (
    "tp=1,pp=1,dp=1", "tp=2,pp=2,dp=1", "tp=8,pp=2,dp=1", "tp=4,pp=4,dp=1", "tp=2,pp=2,vp=2,dp=1,schedule=interleaved",
)  # fmt: skip


@pytest.mark.parametrize("card", rest_is_slow(model_names(), 4))
@settings(max_examples=1)
@given(data=st.data())
def test_through_all_forms_and_back(card: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory):
    folder, config = tmp_path_factory.mktemp("forms"), reduced(card)
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    first = written(folder / "first", config, dtype)
    model = load_model(first)
    texts = data.draw(st.lists(st.sampled_from(LAYOUTS), min_size=2, max_size=2))
    plans = [plan_of(text, model, global_batch=8) for text in texts]
    converted(first, folder / "one", form="autoshard", plan=plans[0])
    converted(folder / "one", folder / "other", form="autoshard", plan=plans[1])
    converted(folder / "other", folder / "whole", form="autoshard")
    last = folder / "whole"
    if config["model_type"] in FAMILIES:
        text, platform = data.draw(st.sampled_from(CUTS)), data.draw(st.sampled_from(["trn1", "trn2"]))
        qkv = data.draw(st.sampled_from(["fused", "split", "apart", None]))
        last = folder / "nxd"
        converted(folder / "other", last, form="nxd", plan=cut(text, model, platform), qkv=qkv)
        assert form_of(last) == "nxd"
    converted(last, folder / "state.pt", form="pt")
    converted(folder / "state.pt", folder / "last", model=str(last))
    same(read(first), read(folder / "last"))
    assert (folder / "last" / "tokenizer.json").read_text() == "{}"


CASES = [("llama", {"tie_word_embeddings": True, "attention_bias": True}), *((family, {}) for family in SMALL_FAMILIES)]


@pytest.mark.parametrize(("family", "changes"), rest_is_slow(CASES, 4))
def test_logits_of_what_is_exported_are_those_of_transformers(family: str, changes: Any, tmp_path: Path):
    module = module_of(family, **changes)
    module.save_pretrained(tmp_path / "first", max_shard_size="6KB")
    model = load_model(tmp_path / "first")
    plan = plan_of("tp=2,pp=2,dp=1", model)
    converted(tmp_path / "first", tmp_path / "ours", form="autoshard", plan=plan)
    source = tmp_path / "ours"
    if family in FAMILIES:
        converted(source, tmp_path / "nxd", form="nxd", plan=plan)
        source = tmp_path / "nxd"
    converted(source, tmp_path / "last")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "last", attn_implementation="eager")
    tokens = torch.randint(0, 19, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(found(tokens).logits, module(tokens).logits, rtol=0, atol=1e-5)
    tied = changes.get("tie_word_embeddings", False)
    assert found.config.tie_word_embeddings == module.config.tie_word_embeddings
    assert not tied or found.lm_head.weight is found.model.embed_tokens.weight
