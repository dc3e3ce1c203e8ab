"""The decoder against transformers, against itself unpacked, and against the arrow of time."""

import pytest
import torch

from nanodag.config.dial import Shape
from nanodag.errors import ConfigError
from nanodag.model.build import initialise, qwen3_architecture
from nanodag.model.decoder import Decoder
from nanodag.model.folder import load, save
from nanodag.tokenizer.bpe import save_tokenizer
from nanodag.tokenizer.layout import SPECIAL_TOKENS
from tests.sampler.reference import make_engine

VOCABULARY = 97
COMMON = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
}
SHAPE = Shape(depth=2, width=32, num_heads=4, num_kv_heads=2, head_width=8, mlp_width=64, tied_embeddings=False)


def begun(tied: bool, **options) -> Decoder:
    shape = Shape(**{**vars(SHAPE), "tied_embeddings": tied})
    model = Decoder(qwen3_architecture(shape, vocabulary=VOCABULARY, rope_theta=10_000.0, max_positions=64), **options)
    initialise(model, 0)
    return model


def tiny(tied: bool = False, **options) -> Decoder:
    model = begun(tied, **options)
    with torch.no_grad():
        for parameter in model.parameters():  # output projections begin at 0 and would hide the layers
            if parameter.abs().max() == 0:
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(1))
    return model


def row(*lengths: int):
    """One packed row of documents: input_ids, position_ids, document_ids, targets."""
    generator = torch.Generator().manual_seed(2)
    total = sum(lengths)
    ids = torch.randint(0, VOCABULARY, (1, total), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    targets = torch.randint(0, VOCABULARY, (1, total), generator=generator)
    return ids, positions, documents, targets


def write_tokenizer(folder):
    size = VOCABULARY - len(SPECIAL_TOKENS)
    save_tokenizer({bytes([value]): value for value in range(size)}, folder)
    return folder


def hugging_face_model(name, settings):
    import transformers

    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**COMMON, **settings))


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0, "beta_fast": 2.0, "beta_slow": 0.5}
NESTED = {**YARN, "original_max_position_embeddings": 16}  # of two, transformers takes the one beside it
WINDOW = {"use_sliding_window": True, "sliding_window": 7}
THEIRS = [
    ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    ("Qwen2", {}),
    ("Llama", {"rope_parameters": {**LLAMA3, "rope_theta": 10_000.0, "original_max_position_embeddings": 32}}),
    ("Qwen3", {"head_dim": 16, "rope_parameters": {**YARN, "original_max_position_embeddings": 16}}),
    ("Qwen3", {"head_dim": 16, "original_max_position_embeddings": 32, "rope_parameters": NESTED}),
    ("SmolLM3", {"pad_token_id": 0, "no_rope_layers": [1, 0], "attention_bias": True}),
    ("SmolLM3", {"pad_token_id": 0, "no_rope_layer_interval": 1, "use_sliding_window": True, "sliding_window": 5}),
    ("Mistral", {"head_dim": 16, "sliding_window": 13}),
    ("Qwen2", {**WINDOW, "max_window_layers": 1}),
    ("Qwen3", {**WINDOW, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}),
    ("Qwen3", {"head_dim": 32, "attention_bias": True}),
    ("Llama", {"attention_bias": True}),
]


@pytest.mark.parametrize(("name", "settings"), THEIRS)
def test_logits_and_gradients_of_every_model_type_equal_those_of_transformers(tmp_path, name, settings):
    ids, positions, _, _ = row(40)
    torch.manual_seed(0)
    theirs = hugging_face_model(name, settings)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    found, wanted = ours(ids, positions, torch.zeros_like(ids), want="logits"), theirs(ids).logits
    assert wanted.abs().max() > 0.5
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for logits in (found, wanted):
        logits.log_softmax(-1)[0, :, 1].mean().backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(gradients.pop(name), parameter.grad, rtol=1e-5, atol=1e-5, msg=name)
    assert not gradients


@pytest.mark.parametrize("theirs", ["Llama", "Qwen3"])
def test_a_model_with_biases_that_was_trained_is_read_alike_by_transformers_and_sampler(tmp_path, theirs):
    import transformers

    hugging_face_model(theirs, {"attention_bias": True}).save_pretrained(tmp_path / "begun")
    model = load(tmp_path / "begun")
    ids, positions, documents, targets = row(30)
    for _ in range(3):
        model(ids, positions, documents, targets).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.003 * parameter.grad
                parameter.grad = None
    assert model.model.layers[0].self_attn.o_proj.bias.abs().max() > 0
    weights, tokenizer = dict(model.named_parameters()), write_tokenizer(tmp_path / "tokenizer")
    save(tmp_path / "out", weights, tokenizer=tokenizer, source=tmp_path / "begun", model=model)
    logits = model(ids, positions, documents, want="logits")
    read, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    torch.testing.assert_close(read(ids).logits, logits, rtol=1e-5, atol=1e-5)
    sampled, _ = make_engine(tmp_path / "out").model.prompt_logprobs(ids[0].numpy())
    wanted = logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(sampled), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_saved_is_loaded_by_transformers_with_the_same_logits(tmp_path, tied):
    from transformers import AutoModelForCausalLM

    model = tiny(tied)
    weights, tokenizer = dict(model.named_parameters()), write_tokenizer(tmp_path / "tokenizer")
    save(tmp_path / "out", weights, tokenizer=tokenizer, model=model)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids, positions, documents, _ = row(30)
    logits = model(ids, positions, documents, want="logits")
    torch.testing.assert_close(logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)
    again = load(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_token_sees_its_own_document_up_to_itself_and_nothing_else():
    model = tiny()
    ids, positions, documents, _ = row(5, 7)
    embedded = model.model.embed_tokens(ids).detach().requires_grad_()
    model.model.embed_tokens.forward = lambda _: embedded
    logits = model(ids, positions, documents, want="logits")
    for place in range(12):
        gradient = torch.autograd.grad(logits[0, place].square().sum(), embedded, retain_graph=True)[0]
        seen = gradient[0].abs().sum(-1) > 0
        begin = 0 if place < 5 else 5
        assert seen.tolist() == [begin <= other <= place for other in range(12)]


def test_packed_documents_have_the_loss_and_gradient_of_documents_alone():
    lengths = (9, 4, 6)
    ids, positions, documents, targets = row(*lengths)
    packed, alone = tiny(), tiny()
    loss = packed(ids, positions, documents, targets)
    loss.backward()
    sum_alone = torch.zeros(())
    for begin, length in zip((0, 9, 13), lengths):
        part = slice(begin, begin + length)
        sum_alone += alone(ids[:, part], positions[:, part], torch.zeros_like(ids[:, part]), targets[:, part])
    sum_alone.backward()
    torch.testing.assert_close(loss, sum_alone)
    for one, other in zip(packed.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_padding_changes_nothing_and_makes_no_nan():
    model = tiny()
    ids, positions, documents, targets = row(8)
    wanted = model(ids, positions, documents, targets)
    pad = torch.zeros((1, 3), dtype=torch.int64)
    padded = (ids, pad), (positions, torch.arange(3)[None]), (documents, pad - 1), (targets, pad - 100)
    torch.testing.assert_close(model(*(torch.cat(both, 1) for both in padded)), wanted)


def test_loss_and_logprobs_are_those_of_the_logits():
    model = tiny()
    ids, positions, documents, targets = row(6, 5)
    targets[0, [0, 7]] = -100
    logprobs = torch.log_softmax(model(ids, positions, documents, want="logits")[0], -1)
    kept = targets[0] >= 0
    wanted = logprobs[kept].gather(1, targets[0, kept, None]).squeeze(1)
    torch.testing.assert_close(model(ids, positions, documents, targets), -wanted.sum())
    found, entropy = model(ids, positions, documents, targets, want="logprobs")
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(entropy, -(logprobs.exp() * logprobs).sum(-1)[kept])


def loss_and_gradients(model):
    loss = model(*row(6, 5))
    loss.backward()
    return loss, [parameter.grad for parameter in model.parameters()]


def test_activation_checkpointing_gives_the_same_gradients():
    (_, one), (_, other) = (loss_and_gradients(model) for model in (tiny(), tiny(activation_checkpointing=True)))
    assert all(map(torch.equal, one, other))


@pytest.mark.slow
def test_compiled_layers_give_the_same_loss_and_gradients():
    (loss, one), (other_loss, other) = (loss_and_gradients(model) for model in (tiny(), tiny(compiled=True)))
    torch.testing.assert_close(loss, other_loss)
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_first_loss_is_near_that_of_guessing():
    loss = begun(True)(*row(60)).item() / 60
    assert loss == pytest.approx(torch.tensor(float(VOCABULARY)).log().item(), abs=0.3)


def test_a_seed_gives_the_same_weights_again_and_another_seed_others():
    first, again = tiny(), tiny()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    initialise(again, 5)
    assert not torch.equal(first.model.embed_tokens.weight, again.model.embed_tokens.weight)


def test_a_folder_that_lacks_a_tensor_or_holds_one_too_many_is_refused(tmp_path):
    model = tiny()
    weights, tokenizer = dict(model.named_parameters()), write_tokenizer(tmp_path / "tokenizer")
    lacking = {name: t for name, t in weights.items() if name != "model.norm.weight"}
    save(tmp_path / "lacking", lacking, tokenizer=tokenizer, model=model)
    with pytest.raises(ConfigError, match=r"lacks 1 tensor, the first is model\.norm\.weight"):
        load(tmp_path / "lacking")
    save(tmp_path / "more", {**weights, "extra": torch.zeros(1)}, tokenizer=tokenizer, model=model)
    with pytest.raises(ConfigError, match="holds extra"):
        load(tmp_path / "more")
