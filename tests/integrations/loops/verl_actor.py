"""Update a policy on given responses, in the style of verl's actor."""

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def entropy_from_logits(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


class Actor:
    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=503, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
        )
        self.actor_module = AutoModelForCausalLM.from_config(config).to(dtype)
        self.actor_optimizer = torch.optim.AdamW(self.actor_module.parameters(), lr=1e-2)

    def _forward_micro_batch(self, micro_batch: dict[str, Tensor], temperature: float) -> tuple[Tensor, Tensor]:
        """Return entropies and log-probabilities, (batch, response_length)."""
        input_ids, responses = micro_batch["input_ids"], micro_batch["responses"]
        response_length = responses.size(-1)
        output = self.actor_module(input_ids=input_ids, use_cache=False)
        logits = output.logits / temperature
        logits = logits[:, -response_length - 1 : -1, :]
        log_probs = logprobs_from_logits(logits, responses)
        entropy = entropy_from_logits(logits)
        return entropy, log_probs

    def update_policy(self, data: list[dict[str, Tensor]]) -> list[float]:
        losses = []
        for batch in data:
            entropy, log_prob = self._forward_micro_batch(batch, temperature=0.7)
            ratio = (log_prob - batch["old_log_probs"]).exp()
            advantages = batch["advantages"]
            pg_loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
            policy_loss = pg_loss - 0.01 * entropy.mean()
            policy_loss.backward()
            self.actor_optimizer.step()
            self.actor_optimizer.zero_grad()
            losses += [policy_loss.item(), log_prob.mean().item()]
        return losses


def main(dtype: torch.dtype = torch.float32) -> list[float]:
    actor = Actor(dtype)
    data = []
    for input_ids in torch.randint(503, (5, 4, 24)):
        old, advantages = -6.2 * torch.ones(4, 10), torch.linspace(-1, 1, 4)[:, None]
        data.append(
            {"input_ids": input_ids, "responses": input_ids[:, -10:], "old_log_probs": old, "advantages": advantages}
        )
    return actor.update_policy(data)
