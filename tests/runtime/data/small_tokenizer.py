"""A tokenizer of 300 tokens, made by the library itself."""

import json
from pathlib import Path


def write_tokenizer(folder: Path, **config: object) -> Path:
    """Every byte is a token, "the" and its like too; <eos> is 0, <s> is 1."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<eos>", "<s>", "<|start|>", "<|end|>", "<|eot|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    for token in special[2:]:
        tokenizer.add_tokens([token])  # no more a special one, so that decoding shows it
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"} | config))
    return folder
