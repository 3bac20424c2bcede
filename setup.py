"""The description for a package index, whose pages lack the README's neighbours: links become the names of files."""

import re
from pathlib import Path

from setuptools import setup

text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", text)  # pictures
text = re.sub(r"\[([^]]*)\]\((?!https?:)([^)#]*)[^)]*\)", r"\1 (`\2`)", text)
text += "\nThe files in parentheses are in the source archive, among the downloads of this page.\n"
setup(long_description=text, long_description_content_type="text/markdown")
