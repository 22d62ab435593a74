#!/usr/bin/env bash
# Tests what `make test-release` left in dist/: signatures, checksums, archives and SBOMs; the
# binary of the other architecture, in an emulator; the image, started by runc; the .deb and
# the .rpm, installed in a Debian of its own, and their unit started. It needs root, and
# installs the Debian packages that it uses and the machine lacks. Arguments name the steps
# to run: signatures, files, emulated, image, deb, rpm; without arguments, all.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
dist=$root/dist
work=$root/build/test-release
debian=$work/debian
mkdir -p "$work"
steps=(signatures files emulated image deb rpm)
pids=()

clean() {
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
}
trap clean EXIT

fail() {
  echo "FAIL: $*" >&2
  exit 1
}

# install PROGRAM:PACKAGE... installs the packages whose programs are missing.
install() {
  local missing=()
  for p in "$@"; do
    command -v "${p%%:*}" >/dev/null || missing+=("${p##*:}")
  done
  [ ${#missing[@]} = 0 ] && return
  apt-get update -q >/dev/null
  DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}" >/dev/null
}

version=$(sed -n 's/.*"version":"\([^"]*\)".*/\1/p' "$dist/metadata.json")
arch=$(dpkg --print-architecture)

# free_port prints a port that nothing uses now.
free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

# serves URL waits until a GET answers 200.
serves() {
  for _ in $(seq 600); do
    if [ "$(curl -s -o /dev/null -w '%{http_code}' "$1")" = 200 ]; then return; fi
    sleep 0.1
  done
  fail "no 200 from $1"
}

# configure FILE PORT ADMIN ENGINE writes a configuration with one engine.
configure() {
  cat >"$1" <<EOF
[server]
listen = "127.0.0.1:$2"
[admin]
listen = "127.0.0.1:$3"
[health]
interval = "100ms"
[[engine]]
name = "e0"
url = "http://127.0.0.1:$4"
role = "both"
connector = "none"
EOF
}

# answers PORT asks for three tokens.
answers() {
  curl -sf "http://127.0.0.1:$1/v1/completions" -H 'Content-Type: application/json' \
    -d '{"model":"sim","prompt":"one two three","max_tokens":3}' | grep -q '"text"' || fail "no completion at port $1"
}

# The bundle of a file fits neither a changed file nor another key.
signatures() {
  local cosign=$root/build/release/cosign file names=("pdproxy_${version}_checksums.txt" "pdproxy_${version}_image.tar" "pdproxy-$version.tgz")
  verify() { "$cosign" verify-blob --key "$1" --insecure-ignore-tlog --bundle "$dist/$2.sigstore.json" "$3" >"$work/cosign.log" 2>&1; }
  rm -f "$work"/other.*
  COSIGN_PASSWORD=test "$cosign" generate-key-pair --output-key-prefix "$work/other" 2>/dev/null
  for file in "${names[@]}"; do
    verify "$work/cosign.pub" "$file" "$dist/$file" || fail "the signature of $file: $(cat "$work/cosign.log")"
    (cat "$dist/$file" && echo) >"$work/changed"
    ! verify "$work/cosign.pub" "$file" "$work/changed" || fail "the signature of $file fits a changed file"
    ! verify "$work/other.pub" "$file" "$dist/$file" || fail "the signature of $file fits another key"
    grep -q 'invalid signature' "$work/cosign.log" || fail "cosign: $(cat "$work/cosign.log")"
  done
  rm -f "$work/changed"
}

files() {
  (cd "$dist" && sha256sum --quiet --strict -c "pdproxy_${version}_checksums.txt") || fail "a checksum is wrong"
  local archive list
  for archive in pdproxy_"${version}"_{linux,darwin}_{amd64,arm64}; do
    list=$(tar -tzf "$dist/$archive.tar.gz")
    for file in pdproxy LICENSE config.toml THIRD_PARTY_NOTICES.md man/pdproxy-run.1.gz completions/_pdproxy systemd/pdproxy.service; do
      grep -qx "$archive/$file" <<<"$list" || fail "$archive has no $file"
    done
    [ "$(grep -o '"SPDXID":"SPDXRef-Package-go-module-' "$dist/$archive.tar.gz.spdx.json" | wc -l)" -gt 20 ] || fail "the SBOM of $archive names few modules"
  done
  rm -rf "$work/archive" && mkdir -p "$work/archive"
  tar -xzf "$dist/pdproxy_${version}_linux_$arch.tar.gz" -C "$work/archive" --strip-components=1
  "$work/archive/pdproxy" version | grep -q "^pdproxy $version " || fail "the binary names another version"
}

# The binary for the processor that this machine does not have compiles WebAssembly for that
# processor: check compiles the plugin.
emulated() {
  local other=arm64 machine=aarch64
  if [ "$arch" = arm64 ]; then other=amd64 machine=x86_64; fi
  install "qemu-$machine-static:qemu-user-static"
  rm -rf "$work/emulated" && mkdir -p "$work/emulated"
  tar -xzf "$dist/pdproxy_${version}_linux_$other.tar.gz" -C "$work/emulated" --strip-components=1
  configure "$work/emulated/config.toml" 8080 9090 8000
  printf '[policy]\nplace = "p"\n[[plugin]]\nname = "p"\npath = "%s"\n' "$root/examples/policy-c/policy.wasm" >>"$work/emulated/config.toml"
  emulate() { XDG_CACHE_HOME=$work/emulated/cache "qemu-$machine-static" "$work/emulated/pdproxy" "$@"; }
  emulate version | grep -q "^pdproxy $version " || fail "the binary of $other: $(emulate version 2>&1)"
  emulate check "$work/emulated/config.toml" >"$work/emulated/log" 2>&1 || fail "check on $other: $(cat "$work/emulated/log")"
}

# The digest is the same again, so nothing of the machine or of the time is in the image.
image() {
  install skopeo:skopeo umoci:umoci runc:runc curl:curl
  local archive=$dist/pdproxy_${version}_image.tar config digest port admin engine
  digest=$(sha256sum <"$archive")
  make -s image >/dev/null
  [ "$(sha256sum <"$archive")" = "$digest" ] || fail "a second image differs"
  for a in amd64 arm64; do
    config=$(skopeo --override-arch "$a" inspect --config "oci-archive:$archive")
    grep -q '"User": "65532:65532"' <<<"$config" || fail "the image of $a runs as root"
    grep -q "\"architecture\": \"$a\"" <<<"$config" || fail "the archive has no image of $a"
  done
  rm -rf "$work/image" && mkdir -p "$work/image"
  skopeo copy -q "oci-archive:$archive" "oci:$work/image/layout:test"
  umoci unpack --image "$work/image/layout:test" "$work/image/bundle" 2>/dev/null
  port=$(free_port) admin=$(free_port) engine=$(free_port)
  configure "$work/image/config.toml" "$port" "$admin" "$engine"
  # The host's network and no cgroups, so that the test runs inside other containers too. The
  # command of the image stays as it is.
  python3 - "$work/image/bundle/config.json" "$work/image/config.toml" <<'EOF'
import json, sys
path, config = sys.argv[1:]
spec = json.load(open(path))
assert spec["process"]["user"]["uid"] == 65532, spec["process"]["user"]
assert spec["process"]["args"] == ["/pdproxy", "run", "/etc/pdproxy/config.toml"], spec["process"]["args"]
spec["process"]["terminal"] = False
spec["root"]["readonly"] = True
spec["linux"]["namespaces"] = [n for n in spec["linux"]["namespaces"] if n["type"] not in ("network", "cgroup")]
spec["linux"].pop("resources", None)
spec["mounts"] = [m for m in spec["mounts"] if m["type"] != "cgroup"]
spec["mounts"].append({"destination": "/etc/pdproxy/config.toml", "type": "bind", "source": config, "options": ["bind", "ro"]})
spec["mounts"].append({"destination": "/run/pdproxy", "type": "tmpfs", "source": "tmpfs", "options": ["mode=0700", "uid=65532", "gid=65532"]})
json.dump(spec, open(path, "w"))
EOF
  "$work/image/bundle/rootfs/pdproxy" sim --connector none --role both --listen "127.0.0.1:$engine" >"$work/image/engine.log" 2>&1 &
  pids+=($!)
  runc --root "$work/image/state" run --bundle "$work/image/bundle" "pdproxy-test-$$" >"$work/image/log" 2>&1 &
  local container=$!
  pids+=("$container")
  serves "http://127.0.0.1:$port/health" || { cat "$work/image/log"; exit 1; }
  answers "$port"
  runc --root "$work/image/state" kill "pdproxy-test-$$" TERM
  wait "$container" || fail "the container ended with $?: $(cat "$work/image/log")"
}

# debian makes the Debian in which the packages are installed, once.
debian() {
  install debootstrap:debootstrap curl:curl systemd-nspawn:systemd-container
  if [ ! -e "$debian/etc/ready" ]; then
    rm -rf "$debian" && mkdir -p "$debian"
    debootstrap --variant=minbase --include=systemd,dbus,procps,rpm "$(. /etc/os-release && echo "$VERSION_CODENAME")" "$debian" >"$work/debootstrap.log" 2>&1 || fail "debootstrap: $(tail -n 20 "$work/debootstrap.log")"
    touch "$debian/etc/ready"
  fi
  # Packages and user of an earlier run.
  chroot "$debian" dpkg --purge pdproxy >/dev/null 2>&1
  chroot "$debian" rpm -e --nodeps pdproxy >/dev/null 2>&1 || true
  chroot "$debian" userdel pdproxy 2>/dev/null || true
  rm -rf "$debian/etc/pdproxy"
}

# installed PACKAGE INSTALL UPGRADE REMOVE REMOVED installs a package in the Debian with the
# command INSTALL, then starts the unit and runs UPGRADE, REMOVE and the check REMOVED under
# systemd, in a container with the host's network: the unit starts as on a host, with its user
# and its restrictions. The scripts of the package run at each step.
installed() {
  local file=/pdproxy.${1##*.} port admin engine
  debian
  cp "$1" "$debian$file"
  chroot "$debian" $2 "$file" >"$work/install.log" 2>&1 || fail "$2: $(cat "$work/install.log")"
  chroot "$debian" getent passwd pdproxy >/dev/null || fail "the package made no user"
  chroot "$debian" pdproxy version | grep -q "^pdproxy $version " || fail "the package has another binary"
  chroot "$debian" pdproxy check /etc/pdproxy/config.toml >/dev/null 2>"$work/check.log" || fail "the packaged configuration is invalid"

  port=$(free_port) admin=$(free_port) engine=$(free_port)
  configure "$debian/etc/pdproxy/config.toml" "$port" "$admin" "$engine"
  # What runs in the container, once it is up. The upgrade must keep the configuration and
  # hand the sockets over to a new process.
  cat >"$debian/trial.sh" <<EOF
set -ex
systemd-analyze verify --man=no /usr/lib/systemd/system/pdproxy.service
systemctl enable --now pdproxy.service
systemctl is-active pdproxy.service
touch /started
until [ -e /upgrade ]; do sleep 0.1; done
former=\$(systemctl show --value --property=MainPID pdproxy.service)
[ "\$(stat -c %U "/proc/\$former")" = pdproxy ]
$3 $file
grep -q 127.0.0.1:$port /etc/pdproxy/config.toml
until [ "\$(systemctl show --value --property=MainPID pdproxy.service)" != "\$former" ]; do sleep 0.1; done
systemctl is-active pdproxy.service
systemctl reload pdproxy.service
touch /upgraded
until [ -e /remove ]; do sleep 0.1; done
$4
! systemctl is-active --quiet pdproxy.service
! systemctl is-enabled --quiet pdproxy.service
[ ! -e /usr/bin/pdproxy ]
$5
getent passwd pdproxy
touch /removed
EOF
  cat >"$debian/etc/systemd/system/trial.service" <<'EOF'
[Service]
Type=exec
ExecStart=/bin/sh /trial.sh
ExecStopPost=/bin/sh -c 'journalctl --no-pager -b -u pdproxy -u trial >/journal'
ExecStopPost=/bin/systemctl --no-block poweroff
[Install]
WantedBy=multi-user.target
EOF
  chroot "$debian" systemctl enable trial.service 2>/dev/null
  rm -f "$debian"/{started,upgrade,upgraded,remove,removed,journal}

  "$debian/usr/bin/pdproxy" sim --connector none --role both --listen "127.0.0.1:$engine" >"$work/engine.log" 2>&1 &
  pids+=($!)
  systemd-nspawn -q -D "$debian" --register=no --keep-unit --boot --console=pipe >"$work/nspawn.log" 2>&1 </dev/null &
  local container=$!
  pids+=("$container")
  reaches "$debian/started" "$container"
  serves "http://127.0.0.1:$port/health"
  answers "$port"
  touch "$debian/upgrade"
  reaches "$debian/upgraded" "$container"
  serves "http://127.0.0.1:$port/health"
  answers "$port"
  touch "$debian/remove"
  reaches "$debian/removed" "$container"
  wait "$container" || fail "the container ended with $?"
}

deb() {
  installed "$(ls "$dist"/pdproxy_*_"$arch".deb)" "dpkg -i" "dpkg -i --force-confdef" "dpkg --remove pdproxy" \
    'dpkg --purge pdproxy; [ ! -e /etc/pdproxy/config.toml ]'
}

# reaches FILE PID waits until the trial in the container has made a file.
reaches() {
  until [ -e "$1" ]; do
    kill -0 "$2" 2>/dev/null || { cat "$(dirname "$1")/journal" "$work/nspawn.log"; fail "the trial ended before $1"; }
    sleep 0.1
  done
}

rpm_package() {
  install rpm:rpm
  local package list machine=x86_64
  if [ "$arch" = arm64 ]; then machine=aarch64; fi
  package=$(ls "$dist"/pdproxy-*."$machine".rpm)
  list=$(rpm -qlp "$package" 2>/dev/null)
  for file in /usr/bin/pdproxy /etc/pdproxy/config.toml /usr/lib/systemd/system/pdproxy.service /usr/lib/systemd/system/pdproxy-sidecar@.service /usr/lib/sysusers.d/pdproxy.conf /usr/share/man/man1/pdproxy.1.gz; do
    grep -qx "$file" <<<"$list" || fail "the .rpm has no $file"
  done
  [ "$(rpm -qcp "$package" 2>/dev/null)" = /etc/pdproxy/config.toml ] || fail "the configuration of the .rpm is no configuration file"
  rpm -qp --scripts "$package" 2>/dev/null | grep -q USR2 || fail "the .rpm has no script"
  # Debian's rpm knows no package of Debian, so it cannot check dependencies.
  installed "$package" "rpm -i --nodeps --ignorearch" "rpm -U --nodeps --ignorearch --replacepkgs" "rpm -e pdproxy" '[ -e /etc/pdproxy/config.toml.rpmsave ]'
}

for name in "${steps[@]}"; do
  if [ $# = 0 ] || [[ " $* " == *" $name "* ]]; then
    case $name in rpm) rpm_package ;; *) "$name" ;; esac
    echo "ok: $name"
  fi
done
