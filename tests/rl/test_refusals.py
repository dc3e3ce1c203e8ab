"""Settings of an RL stage that cannot work, or would do nothing: refused before anything runs, by their names."""

import pytest

from nanodag.config.kinds.rl import RLStage

GAE = {"advantage": "gae"}
BEHIND = {"max_staleness": 1}
LOOSE = {"sampler": {"deterministic": False}}
SAVED = {"source": "file:/r"}
APART = {"placement": "separate"}
TWO = {"prompts_per_step": 2, "correction": "tis"}
SHORT = {"max_new_tokens": 8, "sampler": {"context": 64}}
PARTIAL = {"partial_rollout_tokens": 8, "over_sampling": 64}
ROUTED = {"router_replay": True}
LENGTH = {"name": "length", "options": {"longest": 3}}

REFUSED = [
    # vLLM
    ({"sampler": {"engine": "vllm", "deterministic": True}}, "samples of vllm depend on what runs beside"),
    ({"sampler": {"engine": "vllm"}, **ROUTED}, "cannot tell experts"),
    ({"sampler": {"engine": "vllm"}, "placement": "shared"}, "gives no memory back"),
    ({"sampler": {"engine": "vllm"}, "lora_sync": "adapter", "lora_rank": 4, "sync": "ipc"}, "adapters as a folder"),
    ({"sampler": {"engine": "vllm"}, "sync_check_every": 5}, "weights of vLLM, and of SGLang on a GPU, cannot be"),
    ({"sampler": {"engine": "vllm", "options": {"max_model_len": 9}}}, "follows from other fields"),
    # algorithm
    ({"kl_in": "reward"}, "kl_coefficient is 0"),
    ({"reference_every": 2}, "refreshes nothing"),
    ({"kl_in": "reward", "kl_coefficient": 0.1, "kl_unbiased": True}, "needs no mending"),
    ({"kl_kind": "k1"}, "kl_kind k1 means nothing with kl_coefficient 0"),
    ({"kl_unbiased": True}, "kl_unbiased True means nothing with kl_coefficient 0"),
    ({"kl_unbiased": True, "kl_metric": True}, "kl_unbiased True means nothing with kl_coefficient 0"),
    ({"correction_floor": 0.5}, "correction_floor 0.5 means nothing with correction none"),
    ({"correction_cap": 3.0}, "correction_cap 3.0 means nothing with correction none"),
    ({"correction": "mis", "correction_floor": 2.0}, "not below correction_cap"),
    ({"policy_loss": "cispo", "dual_clip": 3.0}, "dual_clip 3.0 means nothing with policy_loss cispo"),
    ({"policy_loss": "reinforce", "clip_high": 0.3}, "clip_high 0.3 means nothing with policy_loss reinforce"),
    ({"policy_loss": "sapo", "clip_low": 0.3}, "clip_low 0.3 means nothing with policy_loss sapo"),
    ({"sapo_negative": 2.0}, "sapo_negative 2.0 means nothing with policy_loss ppo_clip"),
    ({"overlong_penalty": 0.5}, "overlong_penalty 0.5 means nothing with overlong_buffer 0"),
    ({"overlong_buffer": 300}, "above max_new_tokens 256"),
    ({"samples_per_prompt": 1, "filters": []}, "leaves advantage grpo nothing to compare"),
    ({"samples_per_prompt": 1, **GAE}, "of one"),
    # optimizer, horizon
    ({"learning_rate_minimum": 1e-7}, "learning_rate_minimum 1e-07 means nothing with learning_rate_decay none"),
    ({"learning_rate_decay": "cosine", "learning_rate_minimum": 1e-3}, "0.001 is above learning_rate 1e-06"),
    ({"num_epochs": 1.0, "num_steps": 50}, "num_epochs 1 and num_steps 50 both say"),
    ({"num_epochs": 1.0, "data": [{"url": "file:x", "weight": 1.0}]}, "mixture by weights"),
    *[({"resources": {"num_ranks": ranks}, "sequence_parallel": size}, f"num_ranks {ranks} is not a multiple")
      for ranks, size in ((3, 2), (2, 4), (1, 2))],
    # critic, reference, teacher
    ({"critic": {"warmup_steps": 2}}, "critic means nothing to advantage grpo"),
    ({**GAE, "critic": {"warmup_steps": 9}, "num_steps": 9}, "leaves the policy untrained"),
    ({**GAE, "critic": {"value_clip": 0.5}}, "bounds nothing while a step updates the critic once"),
    ({**GAE, "critic": {"model": "critic"}}, "neither policy, input nor the absolute path"),
    ({**GAE, "critic": {"model": "input"}, "inputs": {"model": "sft"}}, "do not fit together"),
    ({"reference": {"model": "/m"}}, "reference.model /m is asked nothing"),
    ({"reference": {"model": "/m"}, "kl_metric": True, "reference_every": 3}, "leave one of them out"),
    ({"reference": {"model": "m"}, "kl_metric": True}, "neither policy, input nor the absolute path"),
    ({"reference": {"model": "input"}, "kl_metric": True}, "name a stage as inputs.reference"),
    ({"inputs": {"model": "sft", "teacher": "sft"}}, "teacher.model 'none' and inputs"),
    ({"teacher": {"model": "http://127.0.0.1:1"}}, "name a server as teacher.url"),
    ({"teacher": {"model": "teacher"}}, "neither none, input nor the absolute path"),
    ({"teacher": {"coefficient": 0.5}}, "means nothing without teacher.model or .url"),
    ({"teacher": {"url": "10.0.0.1:30000"}}, "must begin with http://"),
    ({"teacher": {"url": "http://h", "model": "/m"}}, "are two teachers"),
    ({"teacher": {"url": "http://h"}, "temperature": 0.8}, "score a prompt at temperature 1"),
    # entries and their options
    ({"policy_loss": {"name": "ppo_clip", "options": {"clip_low": 0.1}}}, "is the setting clip_low; set it there"),
    ({"advantage": {"name": "gae", "options": {"gamma": 0.9}}}, "is the setting critic.gamma; set it there"),
    ({"advantage": {"name": "rloo", "options": {"gamma": 0.9}}}, "is the setting critic.gamma; set it there"),
    ({"reward": {"name": "reasoning_gym", "options": {"strict": 2}}}, "takes strict as bool, not 2"),
    ({"correction": {"name": "tis", "options": {"bound": 2}}}, "has no option 'bound'; it takes no options"),
    ({"reward": ["f1", "f1"]}, "reward f1 stands twice"),
    ({"reward": {"code": 1.0, "f1": 0.1}, "reward_timeout_s": 6.5}, "6.5 is below 7, what the reward code takes"),
    ({"reward": "reported"}, "generate one_turn says none"),
    ({"filters": ["no_such_filter"]}, "no filter 'no_such_filter'"),
    ({"filters": [LENGTH]}, "has no option 'longest'; it takes highest, lowest, truncated"),
    ({"filters": ["diversity"]}, "needs the option 'lowest'"),
    ({"filters": ["length"]}, "needs an option"),
    ({"filters": [{"name": "nonzero_spread", "options": {"lowest": 1}}]}, "takes no options"),
    ({"generate": "calculater"}, "no generate 'calculater'; choose one of agent, calculator, python"),
    ({"generate": {"name": "calculator", "options": {"calls": 3}}}, "no option 'calls'; it takes max_calls"),
    ({"generate": {"name": "one_turn", "timeout_s": 3}}, "generate.timeout_s means nothing to one_turn"),
    ({"generate": {"name": "agent"}}, "needs the option 'command'"),
    ({"generate": {"name": "agent:my_agents:solve", "options": {"pyhton": "x"}}}, "has no option 'pyhton'"),
    ({"generate": {"name": "agent:solve"}}, "needs a function as agent:package.module:function"),
    # rollouts that go on, their order
    ({"partial_rollout_tokens": 8}, "partial_rollout_tokens 8 needs over_sampling"),
    ({**PARTIAL, "partial_rollouts": "correct"}, "partial_rollout_tokens (found 8) and max_staleness (found 0)"),
    ({**PARTIAL, "generate": "python"}, "has turns of its own"),
    ({**PARTIAL, "stop": ["x"]}, "begins in one segment"),
    ({**BEHIND, "sync_mode": "retract", "sampler": {"deterministic": True}}, "deterministic: false (found true"),
    ({**LOOSE, **PARTIAL, "sync_mode": "retract", "max_staleness": 2}, "needs partial_rollouts: correct"),
    ({**LOOSE, "sync_mode": "retract"}, "max_staleness above 0 (found 0"),
    ({**BEHIND, "order": "arrival"}, "sync_mode: finish waits for them"),
    ({"order": "arrival", "over_sampling": 64}, "over_sampling 64 chooses groups in the order of their prompts"),
    # one side alone, rollouts of files
    ({"only": "rollouts", "sync": "distributed", "sampler": {"urls": ["http://127.0.0.1:30000"]}}, "no trainer"),
    ({"only": "rollouts", **SAVED}, "nothing would be generated or trained"),
    ({"only": "rollouts", "keep": "best:a", "benchmarks": [{"name": "a"}]}, "nothing changes the weights"),
    ({"clone": {"best": 1}}, "clone.best 1 chooses from files, and source is samplers"),
    ({**SAVED, "clone": {"best": 1}, "advantage": "rloo"}, "advantage rloo means nothing with rollout.clone"),
    ({**SAVED, "clone": {"lowest_reward": 0.5}}, "means nothing with clone.best 0"),
    ({**SAVED, "num_epochs": 2.0}, "num_epochs 2 with rollout.source file:/r"),
    ({"source": "rollouts.jsonl"}, "source"),
    # experts of the samplers
    ({**ROUTED, "generate": "python"}, "and generate python has turns of its own"),
    ({**ROUTED, "sequence_parallel": 2}, "optimizer.sequence_parallel 2, which no mixture of experts has"),
    ({**ROUTED, **LOOSE, **BEHIND, "sync_mode": "retract"}, "and sync_mode retract: samplers would run tokens again"),
    ({**ROUTED, **PARTIAL}, "with partial_rollout_tokens 8 and sync_mode finish: samplers would run tokens again"),
    ({**ROUTED, "only": "rollouts"}, "router_replay True means nothing with only: rollouts"),
    # placement and weights
    ({**BEHIND, "placement": "shared"}, "placement: shared with rollout.max_staleness 1"),
    ({"placement": "beside", "lends_states": True}, "nobody takes turns"),
    ({"placement": "shared", "sampler": {"gpus": 4}}, "sampler.gpus 4 with placement: shared"),
    ({**APART, "sampler": {"gpus": 4, "nodes": 1}}, "leave one of them out"),
    ({**APART, "resources": {"device": "cpu"}}, "share its cores"),
    ({"sync": "ipc", "sampler": {"urls": ["http://node2:30000"]}}, "ipc with sampler.urls http://node2:30000"),
    ({**APART, "sync": "ipc", "sampler": {"nodes": 1}}, "ipc with sampler.nodes 1"),
    ({**APART, "sync": "ipc", "sampler": {"gpus": 1}, "resources": {"device": "cuda"}}, "ipc with placement: separate"),
    # evaluations
    ({"eval_samples": 4}, "eval_samples 4 would all be the same answer at eval_temperature 0"),
    ({"patience": 3}, "patience 3 waits for a better score, and keep is last"),
    *[({"keep": keep, "benchmarks": [{"name": "a"}]}, "keep") for keep in ("best:eval_reward", "best:b", "best:", "a")],
    ({**SHORT, "benchmarks": [{"name": "a"}, {"name": "a"}]}, "two benchmarks are called 'a'"),
    ({**SHORT, "benchmarks": [{"name": "eval_reward"}]}, "give the benchmark another name"),
    ({**SHORT, "benchmarks": [{"name": "core"}]}, "'core' is scored by likelihood; only an eval stage"),
    ({**SHORT, "benchmarks": [{"name": "a", "judge": "/j.yaml"}]}, "compares with a baseline"),
    ({"combine_rewards": "min", "reward": {"f1": 1, "auto": 1}}, "min with `auto`"),
    ({**SHORT, "benchmarks": [{"name": "a", "max_new_tokens": 64}]}, "max_new_tokens 64 of benchmark a"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "part"), REFUSED, ids=[part for _, part in REFUSED])
def test_settings_that_cannot_work_are_refused_by_name(values, part):
    with pytest.raises(ValueError) as raised:
        RLStage.of(**{"kind": "rl", "data": ["file:x"], **values})
    assert part in str(raised.value)
