#!/usr/bin/env bash
# A SuperLink and three SuperNodes on this machine, without TLS: for trying. Usage: deployment.sh [DIR] [ALGORITHM]
# Needs `pip install "personax[flower]"`. docs/flower.md has the set-up for real machines.
set -euo pipefail
dir=$(realpath -m "${1:-flower-example}") algorithm=${2:-PersA-FL-ME} port=${PORT:-8000}
mkdir -p "$dir" && cd "$dir"

# Nothing calls home, and everything stays in DIR.
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_HOME=$dir/home
mkdir -p "$FLWR_HOME"
cat > "$FLWR_HOME/config.toml" <<TOML
[superlink]
default = "here"
[superlink.here]
address = "127.0.0.1:$port"
insecure = true
TOML

personax flower init app --algorithm "$algorithm"

trap 'kill $(jobs -p) $(cat nodes/*/worker.lock) 2> /dev/null || true; wait' EXIT
flower-superlink --insecure --port "$port" --disable-runtime-dependency-installation > link.log 2>&1 &
for i in 0 1 2; do
    node="partition-id=$i folder=\"$dir/nodes/$i\""  # with samples of its own: name="anna" data="/path/anna.npz"
    flower-supernode --insecure --superlink "127.0.0.1:$port" --port $((port + 1 + i)) --node-config "$node" > "node-$i.log" 2>&1 &
done
until (exec 3<> "/dev/tcp/127.0.0.1/$port") 2> /dev/null; do sleep 0.2; done

flwr run app here --run-config "out=\"$dir/run\"" --stream
for i in 0 1 2; do echo "node $i: $(tr -d ' \n' < "$(echo nodes/$i/*/numbers.json)")"; done
echo "The report is in $dir/run/report.html"
