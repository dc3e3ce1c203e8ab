"""Experts that routers choose, recorded and replayed, against transformers' own forward with its choice forced."""

from base64 import b64decode
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, linear
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from nanodag.errors import BadRequest, ConfigError
from nanodag.inference.protocol import Request, SamplingParams
from nanodag.model.attention import document_attention
from nanodag.model.expert_routing import routing_of
from nanodag.model.folder import load, write_like
from nanodag.model.transformers_class import load_class
from nanodag.model.transformers_model import TransformersModel, replay_routes
from tests.model.model_types import make_tiny, taken_by_transformers
from tests.sampler.test_transformers_sampler import PROMPTS, _engine

pytestmark = pytest.mark.filterwarnings("ignore")
LAYERS, EXPERTS, TOP_K = 4, 4, 2
DOCUMENTS = np.array([[0] * 20 + [1] * 13 + [2] * 7])
SAME_AS_CLASS = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe"]


def tiny(folder: Path, name: str = "qwen3_moe", **settings: Any) -> Any:
    model = make_tiny(name, folder, **settings)
    taken_by_transformers(folder)
    return model


def routed(folder: Path, **options: Any) -> TransformersModel:
    model = load(folder, **options)
    replay_routes(model)
    assert isinstance(model, TransformersModel)
    return model


def some_routes(num_tokens: int, seed: int = 3) -> torch.Tensor:
    """(N, L * K) int32: any two different experts of each token and layer, as no router would choose them."""
    noise = torch.rand(num_tokens, LAYERS, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return noise.argsort(-1)[..., :TOP_K].flatten(1).int()


class Forced:
    """Routers of Qwen3-MoE written from its paper, which take `routes` (N, L, K) of the text that is computed."""

    def __init__(self, model: Any) -> None:
        self.routes = torch.empty(0)
        routers = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
        for layer, router in enumerate(routers):
            router.forward = lambda hidden, router=router, layer=layer: self._of(router, layer, hidden)

    def _of(self, router: Any, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
        chosen = self.routes[:, layer].long()
        weights = logits.float().softmax(-1)[torch.arange(len(chosen))[:, None], chosen]
        return logits, weights / weights.sum(1, keepdim=True) if router.norm_topk_prob else weights, chosen


def ids_of(documents: np.ndarray) -> torch.Tensor:
    return torch.randint(3, 96, documents.shape, generator=torch.Generator().manual_seed(1))


def logits_of(model: Any, ids: torch.Tensor, routes: torch.Tensor | None = None) -> torch.Tensor:
    hidden = model(ids, ids, attend=document_attention(DOCUMENTS), want="hidden", routes=routes)
    return model.lm_head(hidden, None, "logits", 1.0)[0]


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_packed_documents_with_given_experts_have_the_logits_of_each_alone(
    tmp_path: Path, norm_topk_prob: bool
) -> None:
    theirs, ours = tiny(tmp_path, norm_topk_prob=norm_topk_prob), routed(tmp_path)
    ids, routes = ids_of(DOCUMENTS), some_routes(40)
    forced = Forced(theirs)
    with torch.no_grad():
        found = logits_of(ours, ids, routes)
        for number in range(3):
            is_in = torch.from_numpy(DOCUMENTS[0] == number)
            forced.routes = routes[is_in].view(-1, LAYERS, TOP_K)
            expected = theirs(input_ids=ids[0][is_in][None]).logits[0]
            assert (found[is_in] - expected).abs().max() <= 1e-5
        assert (found - logits_of(ours, ids)).abs().max() > 0.01  # its own choice is another


def test_a_document_without_a_record_is_routed_by_the_model_itself(tmp_path: Path) -> None:
    tiny(tmp_path)
    ours, ids, routes = routed(tmp_path), ids_of(DOCUMENTS), some_routes(40)
    routes[torch.from_numpy(DOCUMENTS[0] == 1)] = -1
    with torch.no_grad():
        found, own = logits_of(ours, ids, routes), logits_of(ours, ids)
    assert torch.equal(found[20:33], own[20:33])
    assert (found[:20] - own[:20]).abs().max() > 0.01


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_forced_class_whatever_is_computed_again(
    tmp_path: Path, checkpointing: bool
) -> None:
    theirs = tiny(tmp_path, norm_topk_prob=True)
    ours = routed(tmp_path, activation_checkpointing=checkpointing)
    ids, routes = ids_of(DOCUMENTS), some_routes(40)
    targets = torch.where(torch.arange(40) % 5 == 4, -100, ids.roll(-1, 1))
    ours(ids, ids, targets=targets, attend=document_attention(DOCUMENTS), routes=routes).backward()
    forced, expected = Forced(theirs), []
    for number in range(3):
        is_in = torch.from_numpy(DOCUMENTS[0] == number)
        forced.routes = routes[is_in].view(-1, LAYERS, TOP_K)
        expected.append(theirs(input_ids=ids[0][is_in][None]).logits[0])
    cross_entropy(torch.cat(expected), targets[0], reduction="sum").backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        largest = gradients[name].grad.abs().max()
        assert (parameter.grad - gradients[name].grad).abs().max() <= 1e-4 * largest, name
    assert any(parameter.grad.abs().max() > 0 for name, parameter in ours.named_parameters() if "gate.weight" in name)


def test_a_router_that_breaks_ties_otherwise_computes_the_samplers_logits_by_its_experts(tmp_path: Path) -> None:
    model = make_tiny("qwen3_moe", tmp_path / "sampler")
    for router in (module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)):
        router.weight.data[1:] = router.weight.data[1]  # three experts that no token prefers to one another
    for name, sign in (("sampler", 1.0), ("trainer", -1.0)):
        model.save_pretrained(tmp_path / name)
        taken_by_transformers(tmp_path / name)
        weights = {n: p.detach().clone() for n, p in load(tmp_path / name).named_parameters()}
        for n in (n for n in weights if n.endswith("gate.weight")):
            weights[n][1:] += sign * 1e-5 * torch.tensor([-1.0, 0.0, 1.0])[:, None] * weights[n][1].sign()
        write_like(tmp_path / name, tmp_path / f"{name}-2", load(tmp_path / name).checkpoint(weights).items(),
                   dtype=torch.float32)  # fmt: skip
    params = SamplingParams(temperature=1.0, max_new_tokens=27, sampling_seed=1, ignore_eos=True)
    request = Request(input_ids=PROMPTS[0], params=params, return_routed_experts=True)
    (completion,) = _engine(tmp_path / "sampler-2", deterministic=True).generate([request])[0]
    row = torch.tensor([PROMPTS[0] + completion.output_ids[:-1]])
    routes = torch.from_numpy(np.frombuffer(b64decode(completion.routed_experts), np.int32).reshape(row.shape[1], -1))
    ours, attend = routed(tmp_path / "trainer-2"), document_attention(np.zeros(row.shape, dtype=np.int64))
    apart = []
    for given in (None, routes):
        with torch.no_grad():
            hidden = ours(row, row, attend=attend, want="hidden", routes=given)
            scores = ours.lm_head(hidden, None, "logits", 1.0)[0, -27:].float().log_softmax(-1)
        logprobs = scores.gather(1, torch.tensor(completion.output_ids)[:, None])[:, 0]
        apart.append((logprobs - torch.tensor(completion.logprobs)).abs().max().item())
    assert apart[0] > 0.05 and apart[1] < 1e-3


@pytest.mark.parametrize("is_deterministic", [True, False])
@pytest.mark.parametrize("name", SAME_AS_CLASS)
def test_the_sampler_tells_the_experts_that_the_class_chooses_of_a_whole_text(
    tmp_path: Path, name: str, is_deterministic: bool
) -> None:
    theirs = tiny(tmp_path, name)
    seen: dict[int, torch.Tensor] = {}
    for layer, block in enumerate(theirs.model.layers):
        experts = getattr(block.mlp, "experts", None)
        if experts is not None:  # its second argument are the chosen ones
            experts.register_forward_pre_hook(lambda _, inputs, layer=layer: seen.__setitem__(layer, inputs[1]))
    # So long that at the end one moves to a slot below.
    params = [SamplingParams(max_new_tokens=n, n=2, sampling_seed=n, ignore_eos=True) for n in (8, 20, 5)]
    requests = [
        Request(input_ids=prompt, params=of, return_routed_experts=True)
        for prompt, of in zip(PROMPTS, params, strict=True)
    ]
    plain = Request(input_ids=PROMPTS[1], params=params[0].model_copy(update={"n": 1}))
    *groups, unasked = _engine(tmp_path, deterministic=is_deterministic).generate([*requests, plain])
    assert not unasked[0].routed_experts
    for request, group in zip(requests, groups, strict=True):
        for completion in group:
            ids = [*request.input_ids, *completion.output_ids[:-1]]
            found = np.frombuffer(b64decode(completion.routed_experts), np.int32).reshape(len(ids), LAYERS, TOP_K)
            with torch.no_grad():
                theirs(input_ids=torch.tensor([ids]))
            for layer in range(LAYERS):
                expected = seen[layer].sort().values.tolist() if layer in seen else [[0, 0]] * len(ids)
                assert np.sort(found[:, layer]).tolist() == expected


def test_a_model_without_known_routers_is_refused_on_both_sides(tmp_path: Path) -> None:
    for name in ("llama", "phimoe"):
        tiny(tmp_path / name, name)
        with pytest.raises(ConfigError, match=f"router_replay is true, and a model of type {name} has no routers"):
            routed(tmp_path / name)
        with pytest.raises(BadRequest, match="no routers of experts are known"):
            _engine(tmp_path / name).generate(
                [Request(input_ids=[3], params=SamplingParams(max_new_tokens=4), return_routed_experts=True)]
            )
    own: Any = SimpleNamespace(architecture=SimpleNamespace(model_type="qwen3"))
    with pytest.raises(ConfigError, match="of type qwen3"):
        replay_routes(own)


def test_a_class_that_is_refused_is_left_as_it_was_however_often_it_is_asked(tmp_path: Path) -> None:
    tiny(tmp_path, "phimoe")
    whole = load_class(tmp_path).whole
    assert routing_of(whole) is routing_of(whole) is None
    assert not any("forward" in vars(module) for module in whole.modules())


def test_routes_of_another_model_are_refused(tmp_path: Path) -> None:
    tiny(tmp_path)
    with pytest.raises(ConfigError, match="have 6 routed experts a token, and the model 2 in each of 4 layers"):
        logits_of(routed(tmp_path), ids_of(DOCUMENTS), some_routes(40)[:, :6])
    beyond = some_routes(40)
    beyond[3, 5] = 1000
    with pytest.raises(ConfigError, match="Rollouts name expert 1000, and the model has"):
        logits_of(routed(tmp_path), ids_of(DOCUMENTS), beyond)
