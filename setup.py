from setuptools import setup  # noqa: D100

setup()
