"""Where packages lie in a wheel: flows, tasks and what is read at run time go into nanodag/shipped, so that nothing but
nanodag lies in site-packages. An editable install leaves all of it where it is (nanodag/host/folders.py tells them
apart). Everything else is in pyproject.toml.
"""

import sys

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

SHIPPED = "nanodag.shipped"
LAYOUT = {SHIPPED: ".", f"{SHIPPED}.flows": "flows", f"{SHIPPED}.tasks": "tasks"}


class BuildPy(build_py):
    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """The same without this file, which would be a module of `.`."""
        return [] if package == SHIPPED else super().find_package_modules(package, package_dir)


if "editable_wheel" in sys.argv:
    setup(packages=find_packages(include=["nanodag*", "flows", "tasks"]))
else:
    packages = [*find_packages(include=["nanodag*"]), *LAYOUT]
    setup(packages=packages, package_dir=LAYOUT, cmdclass={"build_py": BuildPy})
