#!/usr/bin/env bash
# Installs the wheel and the Debian package of this machine's architecture on a fresh Debian root each, where no compiler, no Rust and
# nothing of the project is, and lets the demo model answer. Needs root and debootstrap.
#
#   package/check.sh [SUITE]     (default: bookworm)
set -euo pipefail
cd "$(dirname "$0")/.."
dist=$PWD/target/dist
suite=${1:-bookworm}
case $(uname -m) in
  x86_64) debian=amd64 wheel=x86_64 ;;
  aarch64) debian=arm64 wheel=aarch64 ;;
  *) echo "check.sh: there is no package for $(uname -m)" >&2; exit 1 ;;
esac

step() { printf '\n== %s\n' "$*"; }

(cd "$dist" && sha256sum --quiet --check SHA256SUMS)

roots=$(mktemp -d)
trap 'umount -q "$roots"/*/proc || true; rm -rf "$roots"' EXIT

# A root of Debian with the packages that are named besides the least.
fresh_root() {
  local root=$roots/$1
  shift
  debootstrap --variant=minbase --include="$(IFS=,; echo "$*")" "$suite" "$root" > "$root.log" ||
    { tail -n 20 "$root.log" >&2; return 1; }
  mount -t proc proc "$root/proc"
}

# What a person would do next, without the network.
try_out() {
  local root=$1 carat=$2
  local answer
  unshare --net chroot "$root" "$carat" --version
  answer=$(unshare --net chroot "$root" "$carat" run --temp 0 "What is 2 + 2?")
  echo "$answer"
  case $answer in *4*) ;; *) echo "check.sh: that is no answer" >&2; return 1 ;; esac
}

step "the Debian package on $suite"
fresh_root deb libgcc-s1
cp "$dist"/carat_*_"$debian".deb "$roots/deb/tmp/"
chroot "$roots/deb" sh -c 'dpkg -i /tmp/carat_*.deb'
try_out "$roots/deb" carat
for file in man/man1/carat-run.1.gz bash-completion/completions/carat; do
  [ -s "$roots/deb/usr/share/$file" ] || { echo "check.sh: $file is missing" >&2; exit 1; }
done
chroot "$roots/deb" dpkg --purge carat
if chroot "$roots/deb" sh -c 'command -v carat'; then
  echo "check.sh: the program stays after its package is gone" >&2
  exit 1
fi

step "the wheel on $suite"
fresh_root wheel python3 python3-venv
cp "$dist"/carat-*"$wheel".whl "$roots/wheel/tmp/"
chroot "$roots/wheel" sh -c 'python3 -m venv /opt/venv && /opt/venv/bin/pip install --no-index /tmp/carat-*.whl'
try_out "$roots/wheel" /opt/venv/bin/carat

step "done"
