#!/usr/bin/env bash
# The same app on Flower's own simulation: no SuperNodes, one SuperLink. Usage: simulation.sh [DIR] [ALGORITHM]
# Needs `pip install "personax[flower]" "flwr[simulation]"`. (personax's own simulator is far faster: personax compare.)
set -euo pipefail
dir=$(realpath -m "${1:-flower-simulation}") algorithm=${2:-FedAvg} port=${PORT:-8000}
mkdir -p "$dir" && cd "$dir"

# Nothing calls home, and everything stays in DIR.
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_HOME=$dir/home RAY_USAGE_STATS_ENABLED=0
export XDG_STATE_HOME=$dir/state  # where the simulated nodes keep their personal states
mkdir -p "$FLWR_HOME"
cat > "$FLWR_HOME/config.toml" <<TOML
[superlink]
default = "here"
[superlink.here]
address = "127.0.0.1:$port"
insecure = true
TOML

personax flower init app --algorithm "$algorithm"

trap 'kill $(jobs -p) $(cat state/personax/flower/*/worker.lock) 2> /dev/null || true; wait' EXIT
flower-superlink --insecure --simulation --port "$port" --disable-runtime-dependency-installation > link.log 2>&1 &
until (exec 3<> "/dev/tcp/127.0.0.1/$port") 2> /dev/null; do sleep 0.2; done

flwr run app here --run-config "out=\"$dir/run\"" --federation-config "num-supernodes=3 client-resources-num-cpus=1" --stream
echo "The report is in $dir/run/report.html"
