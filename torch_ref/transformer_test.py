import torch

from torch_ref.transformer import MultiLoRATransformer


def make_transformer(**settings):
    sizes = {"n_layers": 2, "hidden_size": 16, "ffn_hidden_size": 32, "n_heads": 2}
    settings = {"seq_length": 8, "n_slots": 3, "rank": 2, "bias": True} | settings
    model = MultiLoRATransformer(**sizes, **settings)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert ".adapters." in name
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    for name, buffer in model.named_buffers():
        assert name.endswith(".scaling")
        buffer.fill_(0.5)
    return model


def random_tokens(batch, length):
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(2))


def test_base_depends_on_the_seed_alone():
    def base(**settings):
        model = make_transformer(**settings)
        return [p for p in model.parameters() if not p.requires_grad]

    expected = base()
    assert all(torch.equal(a, b) for a, b in zip(base(n_slots=1, rank=3), expected, strict=True))
    assert not torch.equal(base(seed=1)[0], expected[0])


def test_logits_do_not_see_later_tokens():
    model, tokens, slots = make_transformer(), random_tokens(2, 8), torch.tensor([0, 2])
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 256
    before, after = model(tokens, slots), model(changed, slots)
    assert before.shape == (2, 8, 256)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_gradients_flow_to_routed_slots_only():
    model = make_transformer()
    model.sample_losses(random_tokens(3, 9), torch.tensor([2, -1, 2])).sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (".adapters.2." in name), name


def test_mixed_batch_equals_each_tenant_alone():
    model, tokens, slots = make_transformer(), random_tokens(3, 9), torch.tensor([1, 0, -1])
    mixed = model.sample_losses(tokens, slots)
    for i in range(3):
        alone = model.sample_losses(tokens[i : i + 1], slots[i : i + 1])
        torch.testing.assert_close(alone[0], mixed[i])


def test_sample_losses_are_the_mean_cross_entropy():
    model, tokens, slots = make_transformer(), random_tokens(2, 9), torch.tensor([1, 0])
    log_p = torch.log_softmax(model(tokens[:, :-1], slots), dim=-1)
    expected = [-sum(log_p[b, t, tokens[b, t + 1]] for t in range(8)) / 8 for b in range(2)]
    torch.testing.assert_close(model.sample_losses(tokens, slots), torch.stack(expected))
