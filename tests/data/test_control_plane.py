import subprocess
import sys

HEAVY = "{'torch', 'transformers', 'datasets', 'pyarrow', 'reasoning_gym', 'tokenizers', 'deepspeed', 'prefect'}"


def test_urls_adapters_and_identities_import_nothing_heavy(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    code = (
        "import sys; from nanodag.data.config import SourceConfig; from nanodag.data.opening import open_source;"
        "from nanodag.data.mixture import Mixture;"
        "open_source(SourceConfig(url='reasoning_gym:chain_sum?size=3').url).identity();"
        "source = SourceConfig(url=sys.argv[1]); open_source(source.url).identity();"
        "assert [d.record['text'] for d in Mixture([source], kind='document', seed=0)] == ['x'];"
        f"print(sorted({HEAVY} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, f"file:{tmp_path}/a.jsonl"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_batches_import_no_torch():
    imports = "import sys, nanodag.train.batches, nanodag.tokenizer.chat"
    code = f"{imports}; print(sorted(({HEAVY} - {{'tokenizers'}}) & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
