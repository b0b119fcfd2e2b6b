"""What the tests of this plugin compare with: peft's adapters, torch's autograd and its AdamW, one row at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from peft import LoraConfig, get_peft_model
from rlkit_tinker import Datum, ModelInput, TrainingClient
from torch import Tensor, nn

from rlkit.models.load import load_policy
from rlkit.recipe import Model

Formula = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


def random_data(seed: int, rows: int = 3, prompt: Sequence[int] = (5, 6, 7, 8)) -> list[Datum]:
    """Return data with all arrays that any loss reads, after one prompt, of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    data = []
    for row in range(rows):
        count = 6 + 3 * row
        tokens = [*prompt, *torch.randint(3, 250, (count,), generator=generator).tolist()]
        shape = (len(tokens) - 1,)
        advantages = torch.randn(shape, generator=generator)
        advantages[: len(prompt) - 1] = 0
        inputs = {
            "target_tokens": torch.tensor(tokens[1:]),
            "weights": torch.randn(shape, generator=generator),
            "logprobs": -5.5 + torch.randn(shape, generator=generator),
            "advantages": advantages,
            "sequence_ratio_mask": (advantages != 0).float(),
        }
        data.append(Datum(ModelInput.from_ints(tokens[:-1]), inputs))
    return data


class PeftOracle:
    """A model of peft in float64 with a copy of a client's adapter.

    In float32 its own gradients of single matrices are up to 1e-5 of their norm away from these.
    """

    def __init__(self, client: TrainingClient, model: str = "tiny") -> None:
        pairs = client.adapter.pairs
        config = LoraConfig(r=client.adapter.rank, lora_alpha=32, target_modules=list(pairs), task_type="CAUSAL_LM")
        self.model = get_peft_model(load_policy(Model(model), frozen=True), config).eval()
        self.weights: list[nn.Parameter] = []
        for name, pair in pairs.items():
            layer = self.model.get_base_model().get_submodule(name)
            for matrix, weight in ((layer.lora_A, pair.down), (layer.lora_B, pair.up)):
                matrix["default"].weight.data.copy_(weight)
                self.weights.append(matrix["default"].weight)
        self.model.double()

    def logps(self, datum: Datum) -> Tensor:
        """Return the log-probs of a datum's targets, from a plain pass over its tokens alone."""
        logits = self.model(input_ids=torch.tensor([datum.model_input.to_ints()])).logits[0]
        targets = datum.loss_fn_inputs["target_tokens"].to_torch()
        logps = logits.log_softmax(-1)
        return logps.gather(-1, targets if targets.dim() == 2 else targets[:, None]).view(targets.shape)

    def loss(self, data: Sequence[Datum], formula: Formula) -> Tensor:
        """Return the sum of a formula over data."""
        inputs = [{k: x.to_torch() for k, x in datum.loss_fn_inputs.items()} for datum in data]
        return torch.stack([formula(self.logps(d), x) for d, x in zip(data, inputs, strict=True)]).sum()


def largest_gap(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest norm of a tensor's difference from the expected one, relative to the norm of that."""
    return max(float((a - e).norm() / e.norm()) for a, e in zip(actual, expected, strict=True))


def overall_gap(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the norm of the difference of all tensors together, relative to that of the expected ones."""
    return largest_gap([torch.cat([x.flatten() for x in actual])], [torch.cat([x.flatten() for x in expected])])


def gradients(client: TrainingClient) -> list[Tensor]:
    """Return the retained gradients of a client's adapter."""
    return [weight.grad for weight in client.adapter.parameters]


def randomise(client: TrainingClient, seed: int) -> None:
    """Give B random numbers: with B = 0, A has no gradient."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for pair in client.adapter.pairs.values():
            pair.up.copy_(0.05 * torch.randn(pair.up.shape, generator=generator))
