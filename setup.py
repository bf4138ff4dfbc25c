"""The golden set lies at the top of the repository and, installed, inside the package: dsabisect/golden."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["dsabisect", "dsabisect.*"]), "dsabisect.golden"],
    package_dir={"dsabisect.golden": "golden"},
)
