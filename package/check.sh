#!/usr/bin/env bash
# Installs the wheel and the Debian package of this machine's architecture on a fresh Debian root each, where no compiler, no Rust and
# nothing of the project is, and lets the demo model answer. What is there for the other architecture answers under QEMU. Needs root and
# debootstrap, and for the other architecture what release.sh needs.
#
#   package/check.sh [SUITE]     (default: bookworm)
set -euo pipefail
cd "$(dirname "$0")/.."
dist=$PWD/target/dist
suite=${1:-bookworm}
case $(uname -m) in
  x86_64) debian=amd64 wheel=x86_64 other=aarch64 other_debian=arm64 ;;
  aarch64) debian=arm64 wheel=aarch64 other=x86_64 other_debian=amd64 ;;
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

# What a person would do next, without the network. The arguments run the program.
try_out() {
  local answer
  unshare --net "$@" --version
  answer=$(unshare --net "$@" run --temp 0 "What is 2 + 2?")
  echo "$answer"
  case $answer in *4*) ;; *) echo "check.sh: that is no answer" >&2; return 1 ;; esac
  unshare --net "$@" doctor | grep "compiled ahead, in .*share/carat/kernels" ||
    { echo "check.sh: the kernels that came with it are not found" >&2; return 1; }
}

step "the Debian package on $suite"
fresh_root deb libgcc-s1
cp "$dist"/carat_*_"$debian".deb "$roots/deb/tmp/"
chroot "$roots/deb" sh -c 'dpkg -i /tmp/carat_*.deb'
try_out chroot "$roots/deb" carat
for file in man/man1/carat-run.1.gz bash-completion/completions/carat; do
  [ -s "$roots/deb/usr/share/$file" ] || { echo "check.sh: $file is missing" >&2; exit 1; }
done
chroot "$roots/deb" dpkg --purge carat
if chroot "$roots/deb" sh -c 'command -v carat'; then
  echo "check.sh: the program stays after its package is gone" >&2
  exit 1
fi

step "the container's recipe on the same root"
cp "$dist"/carat_*.deb "$roots/deb/tmp/"
recipe=$(sed -n 's/^RUN //p' package/Containerfile)
[ -n "$recipe" ] || { echo "check.sh: the Containerfile runs nothing" >&2; exit 1; }
chroot "$roots/deb" sh -c "$recipe"
try_out chroot --userspec=carat "$roots/deb" env HOME=/home/carat carat

step "the wheel on $suite"
fresh_root wheel python3 python3-venv
cp "$dist"/carat-*"$wheel".whl "$roots/wheel/tmp/"
chroot "$roots/wheel" sh -c 'python3 -m venv /opt/venv && /opt/venv/bin/pip install --no-index /tmp/carat-*.whl'
try_out chroot "$roots/wheel" /opt/venv/bin/carat

for package in "$dist"/carat_*_"$other_debian".deb; do
  [ -e "$package" ] || continue
  step "the Debian package of $other under QEMU"
  dpkg-deb --extract "$package" "$roots/other"
  try_out "qemu-$other-static" -L "/usr/$other-linux-gnu" "$roots/other/usr/bin/carat"
  mkdir "$roots/wheel-of-other"
  python3 -m zipfile --extract "$dist"/carat-*"$other".whl "$roots/wheel-of-other"
  cmp "$roots"/wheel-of-other/carat-*.data/scripts/carat "$roots/other/usr/bin/carat"
done

step "done"
