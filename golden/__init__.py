"""The committed golden set: manifest and safetensors. Made by scripts/make_goldens; see docs/verdicts.md."""
