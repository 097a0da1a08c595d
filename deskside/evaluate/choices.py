"""The load of a model's experts on evaluated text, by language."""

from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor

from deskside.model.transformer import Transformer
from deskside.ops.moe import MixtureOfExperts

ALL = "all"  # in place of a language, if there is only one or none is known


class ExpertChoices:
    """Context manager that counts how often the tokens of each language choose each expert of each layer.

    counts: (languages, layers, experts), float64 on the CPU. Does nothing for a model without experts, and for one that
    torch compiles, because it would be compiled again.
    """

    def __init__(self, model: Transformer, languages: Sequence[str]):
        self.languages = list(languages) or [ALL]
        self._mixtures = [m for m in model.modules() if isinstance(m, MixtureOfExperts)]
        if is_compiled(model):
            self._mixtures = []
        self._chosen: list[Tensor] = []
        shape = (len(self.languages), len(self._mixtures), model.config.num_experts)
        self.counts = torch.zeros(shape, dtype=torch.float64)

    def __enter__(self) -> "ExpertChoices":
        for mixture in self._mixtures:
            mixture.choices_observer = self._chosen.append
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for mixture in self._mixtures:
            mixture.choices_observer = None

    def add(self, text_BT: Tensor, languages_BT: Tensor | None) -> None:
        """Count the choices of the last forward pass.

        text_BT: True for tokens that count. languages_BT: index in `languages`; None if there is only one.
        """
        if not self._mixtures:
            return
        experts = self.counts.shape[2]
        text_N = text_BT.flatten()
        language_N = torch.zeros_like(text_N, dtype=torch.int64)
        if languages_BT is not None:
            language_N = languages_BT.to(text_N.device).flatten().long()
        for layer, chosen_Nk in enumerate(self._chosen):
            cells_Nk = language_N[:, None] * experts + chosen_Nk
            # Tokens that do not count go to a separate cell. Adding up integers is exact in any order.
            cells = torch.where(text_N[:, None], cells_Nk, len(self.languages) * experts).flatten()
            counts = torch.zeros(len(self.languages) * experts + 1, dtype=torch.int64, device=cells.device)
            counts.scatter_add_(0, cells, torch.ones_like(cells))
            self.counts[:, layer] += counts[:-1].view(-1, experts).cpu()
        self._chosen.clear()

    def load(self) -> dict[str, list[list[float]]]:
        """Return each expert's share of the choices, by language, layer and expert; {} without experts."""
        loads = {}
        for language, counts_LE in zip(self.languages, self.counts, strict=True):
            if counts_LE.sum() > 0:
                shares_LE = counts_LE / counts_LE.sum(dim=1, keepdim=True)
                loads[language] = [[round(share, 6) for share in layer] for layer in shares_LE.tolist()]
        return loads


def is_compiled(model: Transformer) -> bool:
    """Return True if torch compiles the model or its blocks."""
    blocks = any(getattr(layer, "_compiled_call_impl", None) is not None for layer in model.layers)
    return blocks or hasattr(model.hidden_and_router, "_torchdynamo_orig_callable")
