"""Adapters of PEFT on the experts of a small gpt-oss of random weights.

python -m examples.lora_gpt_oss
"""

import peft
import torch
import transformers

import tgl.integrations.peft
import tgl.integrations.transformers


def main(steps: int = 5) -> list[float]:
    """Train the adapters, and return the loss of every step."""
    torch.manual_seed(0)
    tgl.integrations.transformers.register()
    config = transformers.GptOssConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=1,
        num_local_experts=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = transformers.GptOssForCausalLM(config)  # or from_pretrained("openai/gpt-oss-20b")
    model.set_experts_implementation("tgl")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=[], target_parameters=targets))
    tgl.integrations.peft.attach(model)
    model.print_trainable_parameters()

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    tokens, losses = torch.randint(100, (2, 16)), []
    for step in range(steps):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
