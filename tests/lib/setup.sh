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

# criu_for_tests DIR: a program DIR/criu for tests of checkpoints. The host's own where it works; else, on a host of Debian,
# that of Debian 13 with its libraries, unpacked there and not installed: older ones fail on current kernels. Fails, having
# said why, where neither can be had or the kernel doesn't let it work.
criu_for_tests() {
  local of_host uri key packages package log=$1/log
  if [ -x "$1/criu" ] && PATH=$1:$PATH criu check >/dev/null 2>&1; then return; fi
  rm -rf "$1" && mkdir -p "$1/apt/lists/partial" "$1/apt/cache/archives/partial" "$1/root"
  if of_host=$(command -v criu) && criu check >/dev/null 2>&1; then
    ln -s "$of_host" "$1/criu"
    return
  fi
  say "fetching criu"
  read -r uri < <(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' 2>/dev/null) || true
  key=/usr/share/keyrings/debian-archive-keyring.gpg
  [ -n "${uri-}" ] && [ -e $key ] || { echo "SKIP criu: this host's packages are not Debian's"; return 1; }
  echo "deb [signed-by=$key] $uri trixie main" >"$1/apt/sources.list"
  cat >"$1/apt/conf" <<C
Dir::Etc::sourcelist "$1/apt/sources.list";
Dir::Etc::sourceparts "$1/apt/none";
Dir::State::lists "$1/apt/lists";
Dir::Cache "$1/apt/cache";
Acquire::Languages "none";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
C
  packages='criu libcompel1 libc6 libgnutls30t64 libbsd0 libmd0 libnet1 libnftables1 libnl-3-200 libprotobuf-c1 libuuid1 libnftnl11
    libmnl0 libxtables12 libjansson4 libedit2 libtinfo6 libgmp10 libhogweed6t64 libnettle8t64 libidn2-0 libp11-kit0 libtasn1-6
    libunistring5 libffi8 zlib1g libgcc-s1'
  # shellcheck disable=SC2086
  (cd "$1/apt" && APT_CONFIG=$1/apt/conf && export APT_CONFIG && timeout 120 apt-get update && timeout 120 apt-get download $packages) >"$log" 2>&1 ||
    { echo "SKIP criu: $(tail -n 1 "$log")"; return 1; }
  for package in "$1"/apt/*.deb; do dpkg-deb -x "$package" "$1/root"; done
  rm -rf "$1/apt"
  cat >"$1/criu" <<C
#!/bin/sh
exec $1/root/usr/lib64/ld-linux-x86-64.so.2 --library-path $1/root/usr/lib/x86_64-linux-gnu $1/root/usr/sbin/criu "\$@"
C
  chmod 755 "$1/criu"
  "$1/criu" check >"$log" 2>&1 || { echo "SKIP criu: criu check: $(grep Error "$log" | head -n 1)"; return 1; }
}
