# shellcheck shell=bash
# What ./demo and ./check share: the machine is made ready and the programs are built. Sourced, not run.

say() { printf '\n\033[1m==> %s\033[0m\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

need_root() {
  [ "$(id -u)" -eq 0 ] || die "this makes TAP devices, mounts and nftables rules: run it as root"
}

# install PROGRAM=PACKAGE...: installs the packages of those programs that are missing, and says which.
install() {
  local pair missing=()
  PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
  for pair in "$@"; do
    command -v "${pair%%=*}" >/dev/null 2>&1 || missing+=("${pair#*=}")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  command -v apt-get >/dev/null || die "missing: ${missing[*]} (and no apt-get to install them with)"
  say "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq >/dev/null && apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null ||
    die "apt-get install ${missing[*]} failed"
}

# install_engines NAME...: docker or podman. Their packages would start services, which change the host's network: they
# are kept from it, and tests start engines of their own (tests/engines/engine).
install_engines() {
  local name program policy=/usr/sbin/policy-rc.d ours='' code=0
  for name; do
    program=$([ "$name" = docker ] && echo dockerd=docker.io || echo "$name=$name")
    if [ ! -e $policy ] && ! command -v "${program%%=*}" >/dev/null 2>&1; then
      ours=yes
      printf '#!/bin/sh\nexit 101\n' >$policy && chmod 755 $policy
    fi
    (install "$program") || code=$?
    [ -z "$ours" ] || rm -f $policy
    [ $code -eq 0 ] || exit $code
  done
}

# Packages lists are needed for the guest's kernel and for images, even when every program is there.
fresh_lists() {
  apt-cache show linux-image-amd64 >/dev/null 2>&1 || { say "apt-get update"; apt-get update -qq >/dev/null; }
}

need_rust() {
  local have=''
  PATH=$PATH:$HOME/.cargo/bin
  command -v cargo >/dev/null && have=$(cargo --version | cut -d' ' -f2)
  [ -n "$have" ] || install rustup=rustup 2>/dev/null || true
  if [ -z "$have" ] && command -v rustup >/dev/null; then
    say "installing a Rust toolchain with rustup"
    rustup toolchain install stable --profile default >&2 || die "rustup could not install a toolchain"
    have=$(cargo --version | cut -d' ' -f2)
  fi
  [ -n "$have" ] || die "Rust 1.90 or later is needed, with cargo in PATH or ~/.cargo/bin: install it with rustup"
  printf '1.90\n%s\n' "$have" | sort -VC || die "Rust $have is too old: 1.90 or later is needed (rustup update stable)"
}

# build [OPTION...]: the programs and the static agent, where they find each other.
build() {
  say "building torpor and the guest agent"
  [ $# -gt 0 ] || set -- --package torpor-cli --package torpor-vmm
  cargo build --locked --quiet "$@" || die "cargo build failed"
  cargo xtask agent >/dev/null || die "building the guest agent failed"
}

# guest_kernel DIR: unpacks Debian's cloud kernel package there, once; nothing is installed.
guest_kernel() {
  [ -e "$1/complete" ] && return
  say "fetching a guest kernel"
  unpacked "$1" "$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends:/ {print $2; exit}')"
}

# unpacked DIR PACKAGE...: files of Debian's packages there, once; nothing is installed.
unpacked() {
  local dir=$1 package; shift
  [ -e "$dir/complete" ] && return
  rm -rf "$dir" && mkdir -p "$dir"
  for package; do
    (cd "$dir" && apt-get download -qq "$package" >/dev/null 2>&1 && dpkg -x ./*.deb . && rm ./*.deb) ||
      die "the package '$package' could not be fetched (apt-get update?)"
  done
  touch "$dir/complete"
}
