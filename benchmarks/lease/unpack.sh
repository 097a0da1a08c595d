#!/usr/bin/env bash
# Add pieces of a bundle to a rented machine: bash benchmarks/lease/unpack.sh NAME, with build/NAME/* carried along.
set -euo pipefail
python3 benchmarks/bundle.py unpack "build/$1"/* --to "$HOME/lease/bundle-$1"
