"""A store written by another user cannot make a worker run code: nothing of it is unpickled, nothing in it is code."""

import ast
import json
import os
import pickle

import pytest
import yaml

from nanodag.config import resolve
from nanodag.errors import CorruptArtifact, StoreError
from nanodag.evaluation.forms import FormLoader
from nanodag.host.folders import PROJECT
from nanodag.server.local_server import server_of
from nanodag.store import Store
from tests.forks import run_script
from tests.run_records import run_record
from tests.store.making import KEY, forge, publish

SAFE_LOADERS = ("yaml.SafeLoader", "yaml.CSafeLoader", "FormLoader")
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
RUNS_TEXT = {
    # a model's answers, in a sandbox; what is run there is no file of the store
    *(f"nanodag/rewards/sandboxed_tests/{side}.py" for side in ("__init__", "program_side", "tests_side")),
    # in the Python of the verifiers package: a program that the package itself ships as text
    "nanodag/external_envs/verifiers_server.py",
}
# SGLang's protocol sends handles of shared memory so; an unpickler of its own knows a list of names and no other
# (tests/sampler/test_weight_endpoints.py).
READS_HANDLES = "nanodag/sampler/shared_tensors.py"


def calls():
    """Every call in the project's code: file, line, dotted name, keyword -> constant value."""
    for folder in ("nanodag", "tasks", "flows"):
        for path in sorted((PROJECT / folder).rglob("*.py")):
            name = path.relative_to(PROJECT).as_posix()
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    given = {k.arg: constant(k.value) for k in node.keywords}
                    yield name, node.lineno, ast.unparse(node.func), given
                elif isinstance(node, ast.Import | ast.ImportFrom):
                    for module in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]:
                        yield name, node.lineno, f"import {module}", {}


def constant(value):
    return value.value if isinstance(value, ast.Constant) else ast.unparse(value)


def test_nothing_is_unpickled_and_no_file_brings_code():
    wrong = []
    assert issubclass(FormLoader, yaml.SafeLoader)
    for name, line, call, given in calls():
        imported = call.removeprefix("import ").partition(".")[0] if call.startswith("import ") else ""
        is_wrong = (
            (imported in PICKLES and name != READS_HANDLES)
            or call.startswith(("pickle.load", "pickle.Unpickler"))
            or (call in ("torch.load", "load_checkpoint_file") and given.get("weights_only") is not True)
            or (call in ("np.load", "numpy.load") and given.get("allow_pickle", False) is not False)
            or (call == "yaml.load" and given.get("Loader") not in SAFE_LOADERS)
            or call in ("yaml.unsafe_load", "yaml.full_load")
            or (call in ("eval", "exec") and name not in RUNS_TEXT)
            or (call.endswith(".from_pretrained") and given.get("trust_remote_code") is not False)
            or (call.startswith("AutoModel") and "from_pretrained" in call and given.get("use_safetensors") is not True)
        )
        if is_wrong:
            wrong.append(f"{name}:{line}: {call}")
    assert wrong == []


class Evil:
    def __reduce__(self):
        return (os.mkdir, (os.environ["EVIL_WAS_HERE"],))


def test_code_in_a_model_folder_is_never_run(tmp_path, monkeypatch):
    """A tokenizer of somebody's own class, and weights that are a pickle."""
    mark = tmp_path / "was here"
    monkeypatch.setenv("EVIL_WAS_HERE", str(mark))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"model.embed_tokens.weight": Evil()}))
    sizes = ("hidden_size", "head_dim", "intermediate_size", "vocab_size", "max_position_embeddings")
    ones = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    shape = {**dict.fromkeys(sizes, 16), **dict.fromkeys(ones, 1), "tie_word_embeddings": True}
    shape |= {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}
    about = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "auto_map": {"AutoConfig": "evil.C"}}
    (folder / "config.json").write_text(json.dumps({**shape, **about}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}})
    )
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(mark)!r})\nclass Evil: pass\nclass C: pass\n")
    code = (
        "import sys\nfrom pathlib import Path\nfolder = Path(sys.argv[1])\n"
        "from nanodag.model.folder import load\nfrom nanodag.tokenizer.chat import TemplateRenderer\n"
        "for read in (load, TemplateRenderer):\n"
        "    try:\n        read(folder)\n"
        "    except Exception as error:\n        print(read.__name__, error)\n"
    )
    done = run_script(code, folder)
    assert "older formats are not read" in done.stdout, done.stdout + done.stderr
    assert "TemplateRenderer" in done.stdout
    assert not mark.exists(), done.stdout


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "s")


@pytest.fixture
def made(store, product):
    return publish(store, product)


def test_a_file_that_the_manifest_does_not_name_is_refused(store, made):
    (store.local / made.folder / "files" / "tokenizer_config.json").write_text("{}")
    assert store.lookup(KEY) is None
    with pytest.raises(CorruptArtifact, match=r"names no file files/tokenizer_config\.json"):
        store.materialize(made)


@pytest.mark.parametrize("place", ["files/sub", "files", "", ".."])
def test_a_link_in_the_place_of_a_folder_is_refused(store, made, tmp_path, place):
    folder = (store.local / made.folder / place).resolve()
    folder.rename(tmp_path / "outside")
    folder.symlink_to(tmp_path / "outside")
    assert store.lookup(KEY) is None
    with pytest.raises(CorruptArtifact):
        store.attempt(KEY, made.attempt)
    if place == "..":
        with pytest.raises(StoreError, match="is a link"):
            publish(store, tmp_path / "product")


def test_a_lineage_that_leads_out_of_the_store_is_refused(store, made):
    forge(store, made, lambda raw: raw.update(lineage={"model": {"key": "../../etc", "attempt": "../.."}}))
    source = store.attempt(KEY, "0001").lineage["model"]
    with pytest.raises(StoreError, match="not a name the store can use"):
        store.attempt(source["key"], source["attempt"])


def test_a_workspace_of_another_user_is_refused(store, monkeypatch):
    folder = store.workspace(KEY)
    owner = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: owner + 1)
        with pytest.raises(StoreError, match="not this user's alone"):
            store.workspace(KEY)
    folder.chmod(0o777)
    with pytest.raises(StoreError, match="mode 777"):
        store.workspace(KEY)
    folder.chmod(0o755)
    assert store.workspace(KEY) == folder


def test_only_its_owner_can_look_into_a_new_store_and_a_mode_that_was_given_stays(tmp_path, caplog):
    pipeline = resolve(PROJECT / "pipeline.yaml").pipeline
    store = Store(tmp_path / "store")
    home = server_of(pipeline, store, tmp_path).home
    assert [path.stat().st_mode & 0o777 for path in (store.local, home)] == [0o700, 0o700]
    for mode, is_said in ((0o750, False), (0o755, True)):
        store.local.chmod(mode)
        server_of(pipeline, Store(store.local), tmp_path)
        assert store.local.stat().st_mode & 0o777 == mode
        assert (f"the store {store.local} (mode {mode:o}). Close it: chmod 700" in caplog.text) == is_said


def test_a_record_of_another_user_is_read_and_not_resumed(store, monkeypatch):
    store.write_run(run_record("r", file="/tmp/evil/pipeline.yaml"))
    assert store.own_run("r").file == "/tmp/evil/pipeline.yaml"
    path = store.local / "runs" / "r.json"
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(StoreError, match="written by another user"):
        store.own_run("r")
    assert store.read_run("r").number == 1
