"""The shipped templates of work pools hold together: what is filled in exists, what is named is there."""

import json
import re
import subprocess

import yaml

from nanodag.host.folders import PROJECT

TEMPLATES = PROJECT / "docs" / "templates"


def test_the_kubernetes_job_asks_for_its_own_variables_only():
    text = (TEMPLATES / "kubernetes-job.json").read_text()
    asked = set(re.findall(r"{{ (\w+) }}", text))
    assert asked == set(json.loads(text)["variables"]["properties"])


def test_the_kubernetes_worker_serves_one_pool_with_rights_of_its_own():
    documents = {one["kind"]: one for one in yaml.safe_load_all((TEMPLATES / "kubernetes.yaml").read_text())}
    assert set(documents) == {"ServiceAccount", "Role", "RoleBinding", "Deployment"}
    account = documents["Deployment"]["spec"]["template"]["spec"]["serviceAccountName"]
    assert account == documents["ServiceAccount"]["metadata"]["name"]
    assert documents["RoleBinding"]["subjects"][0]["name"] == account


def test_the_slurm_job_is_a_script_that_names_what_it_lacks():
    path = TEMPLATES / "slurm.sh"
    subprocess.run(["bash", "-n", str(path)], check=True)
    done = subprocess.run(["bash", str(path)], capture_output=True, text=True, check=False, env={"PATH": "/bin"})
    assert done.returncode != 0 and "SERVER: the address of the Prefect server" in done.stderr
