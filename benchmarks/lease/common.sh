# For the jobs: their folder, the packages, and functions. `source` it.
cd "$HOME/lease"
export PYTHONPATH=$PWD/src:$PWD/bundle-site/site:$PWD/bundle-site/serve PYTHONUNBUFFERED=1
trap 'touch out/done' EXIT

# say WORDS: print the time and the words.
say() { echo "$(date -u +%T) $*"; }

# wait_for NAME...: wait until the bundles are complete, and link the folder that each is named after.
wait_for() {
    for name in "$@"; do
        until [ -e "bundle-$name/.parts/unpacked" ]; do sleep 1; done
        ln -sfn "bundle-$name/$name" "$name"
        say "$name is here"
    done
}

# extract ARCHIVE.tar.zst: extract it here. tar calls zstd, which the machine doesn't have.
extract() {
    python3 -c "import sys, tarfile, zstandard
with zstandard.open(sys.argv[1]) as stream:
    tarfile.open(fileobj=stream, mode='r|').extractall(filter='data')" "$1"
}

# run NAME COMMAND...: run a command with its output in out/NAME.log, and print when it begins and ends.
run() {
    local name=$1
    shift
    say "$name begins: $*"
    local code=0
    "$@" > "out/$name.log" 2>&1 || code=$?
    say "$name ended with $code"
}
