#!/usr/bin/env bash
# Makes what a release hands out: an archive, a wheel and a Debian package per architecture, and their checksums.
#
#   package/release.sh [--profile PROFILE] [--allow-dirty] [ARCHITECTURE...]
#
# ARCHITECTURE is x86_64 or aarch64; without one it is this machine's. PROFILE is `dist`; `dev` tries the script out. Everything is
# written to target/dist. The same commit gives the same bytes on any machine with the same Debian release and compiler: times
# are the commit's, paths of the machine are left out, and a tree with changes is refused.
set -euo pipefail
cd "$(dirname "$0")/.."
source=$PWD
here=$(uname -m)

profile=dist
dirty=refuse
architectures=()
while [ $# -gt 0 ]; do
  case $1 in
    --profile) profile=${2:?"--profile needs a name"}; shift ;;
    --allow-dirty) dirty=allow ;;
    x86_64 | aarch64) architectures+=("$1") ;;
    *) echo "release.sh: \`$1\` is neither x86_64 nor aarch64 nor a flag; see the top of this file" >&2; exit 2 ;;
  esac
  shift
done
[ ${#architectures[@]} -gt 0 ] || architectures=("$here")

if [ "$dirty" = refuse ] && [ -n "$(git status --porcelain)" ]; then
  echo "release.sh: the tree has changes that no commit names; commit them, or try out with --allow-dirty" >&2
  exit 1
fi

step() { printf '\n== %s\n' "$*"; }

version=$(cargo metadata --locked --no-deps --format-version 1 |
  python3 -c 'import json, sys; print(next(p["version"] for p in json.load(sys.stdin)["packages"] if p["name"] == "carat-cli"))')
# Archives, packages and wheels take their times from this.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
export TZ=UTC LC_ALL=C
umask 022
# Paths in messages and line tables: the project's from its root, others from the registry's.
export RUSTFLAGS="--remap-path-prefix=$source=. --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=cargo"
export CARGO_INCREMENTAL=0
export CARGO_TARGET_DIR=$source/target/package

folder=$profile
[ "$profile" != dev ] || folder=debug
dist=$source/target/dist
# The wheel takes what it installs beside the program from there.
kernels=$source/package/wheel/data/data/share/carat/kernels
work=$source/target/package/work
mkdir -p "$dist" "$work"

maturin=$(command -v maturin || echo "$source/target/tools/maturin/bin/maturin")
if [ ! -x "$maturin" ]; then
  step "maturin"
  python3 -m venv target/tools/maturin
  target/tools/maturin/bin/pip install --quiet --disable-pip-version-check maturin==1.16.0
fi

# Runs a program of the architecture, under QEMU where it is another machine's.
run_for() {
  local architecture=$1
  shift
  if [ "$architecture" = "$here" ]; then
    "$@"
  else
    "qemu-$architecture-static" -L "/usr/$architecture-linux-gnu" "$@"
  fi
}

# Kernels for NVIDIA cards, the same for every processor: with them a first run compiles nothing. Those of the first architecture of a
# generation serve all of it.
make_kernels() {
  local target=$here-unknown-linux-gnu
  crates/cuda/fetch-nvrtc.sh
  cargo build --locked --profile "$profile" --package carat-cli --target "$target"
  rm -f "$kernels"/*.cubin
  "$CARGO_TARGET_DIR/$target/$folder/carat" kernels build --arch sm_80,sm_90a --out "$kernels" --library-dir target/nvrtc
}

# Kernels, completions, manual pages and licences, as an installed program has them under `share`.
lay_out_share() {
  local architecture=$1 binary=$2 share=$3
  mkdir -p "$share"/{man/man1,bash-completion/completions,zsh/vendor-completions,fish/vendor_completions.d,doc/carat}
  run_for "$architecture" "$binary" man --out "$share/man/man1"
  run_for "$architecture" "$binary" completions bash > "$share/bash-completion/completions/carat"
  run_for "$architecture" "$binary" completions zsh > "$share/zsh/vendor-completions/_carat"
  run_for "$architecture" "$binary" completions fish > "$share/fish/vendor_completions.d/carat.fish"
  cp LICENSE-MIT LICENSE-APACHE assets/WORDNET-LICENSE.txt "$share/doc/carat/"
  install -D -m 644 --target-directory "$share/carat/kernels" "$kernels"/*.cubin
  chmod -R u=rwX,go=rX "$share"
}

# Everything in a folder as old as the commit.
date_as_commit() {
  find "$1" -print0 | xargs -0 touch --no-dereference --date="@$SOURCE_DATE_EPOCH"
}

make_archive() {
  local architecture=$1 binary=$2
  local name=carat-$version-linux-$architecture
  local root=$work/$name
  rm -rf "$root"
  install -D -m 755 "$binary" "$root/bin/carat"
  lay_out_share "$architecture" "$binary" "$root/share"
  date_as_commit "$root"
  tar --create --sort=name --owner=0 --group=0 --numeric-owner --directory="$work" "$name" |
    gzip --best --no-name > "$dist/$name.tar.gz"
}

make_debian_package() {
  local architecture=$1 binary=$2
  local debian
  case $architecture in x86_64) debian=amd64 ;; aarch64) debian=arm64 ;; esac
  local maintainer="The Carat project <carat@users.noreply.invalid>"
  local root=$work/deb-$debian
  rm -rf "$root"
  install -D -m 755 "$binary" "$root/usr/bin/carat"
  lay_out_share "$architecture" "$binary" "$root/usr/share"
  local doc=$root/usr/share/doc/carat
  # Debian has one file of licences, and keeps the text of Apache's itself.
  {
    echo "Carat is licensed under MIT or Apache-2.0, at your choice. Apache-2.0 stands in /usr/share/common-licenses/Apache-2.0."
    printf '\n%s\n\n' "MIT:"
    cat LICENSE-MIT
    printf '\n%s\n\n' "The demo model was trained on some text of WordNet:"
    cat assets/WORDNET-LICENSE.txt
  } > "$doc/copyright"
  rm "$doc"/LICENSE-* "$doc/WORDNET-LICENSE.txt"
  gzip --best --no-name --stdout CHANGELOG.md > "$doc/changelog.gz"
  gzip --best --no-name > "$doc/changelog.Debian.gz" <<CHANGES
carat ($version-1) unstable; urgency=medium

  * Release $version.

 -- $maintainer  $(date --utc --rfc-email --date="@$SOURCE_DATE_EPOCH")
CHANGES
  chmod 644 "$doc"/*
  gzip --best --no-name "$root"/usr/share/man/man1/*.1
  # The newest symbols that the program asks of the C library.
  local libc
  libc=$(objdump -T "$binary" | grep -o 'GLIBC_[0-9.]*' | sort -u -V | tail -n 1)
  mkdir "$root/DEBIAN"
  cat > "$root/DEBIAN/control" <<CONTROL
Package: carat
Version: $version-1
Architecture: $debian
Maintainer: $maintainer
Installed-Size: $(du --apparent-size -sk "$root/usr" | cut -f 1)
Depends: libc6 (>= ${libc#GLIBC_}), libgcc-s1
Section: science
Priority: optional
Description: runs Gemma 4 language models on this machine
 Answers prompts, holds conversations and serves OpenAI's, Anthropic's and
 Ollama's clients over HTTP, from any common GGUF file. Computes on an NVIDIA
 card (Ampere or newer) where there is one, and on plain CPUs. A small demo
 model is part of the program.
CONTROL
  date_as_commit "$root"
  dpkg-deb --root-owner-group -Zxz --threads-max=1 --build "$root" "$dist/carat_$version-1_$debian.deb"
}

step "kernels"
make_kernels
for architecture in "${architectures[@]}"; do
  target=$architecture-unknown-linux-gnu
  if [ "$architecture" != "$here" ]; then
    linker=CARGO_TARGET_$(echo "$target" | tr 'a-z-' 'A-Z_')_LINKER
    export "$linker=$architecture-linux-gnu-gcc"
  fi
  step "$architecture: the program and its wheel"
  # Compiles, and asks of the program that it run wherever its tag says.
  (cd package/wheel && "$maturin" build --profile "$profile" --target "$target" --out "$dist")
  binary=$CARGO_TARGET_DIR/$target/$folder/carat
  run_for "$architecture" "$binary" --version

  step "$architecture: archive"
  make_archive "$architecture" "$binary"
  step "$architecture: Debian package"
  make_debian_package "$architecture" "$binary"
done

step "checksums"
cp package/Containerfile "$dist/"
(cd "$dist" && rm -f SHA256SUMS && sha256sum -- * > SHA256SUMS && cat SHA256SUMS && ls -l)
