#!/usr/bin/env bash
# Tests what `make release` left in dist/: checksums, archives and SBOMs; the image, started
# by runc; the .deb, installed in a Debian of its own, and its unit started; the .rpm. It needs
# root, and installs the Debian packages that it uses and the machine lacks. Arguments name
# the steps to run: files, image, deb, rpm; without arguments, all.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
dist=$root/dist
work=$root/build/test-release
mkdir -p "$work"
steps=(files image deb rpm)
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

# The Debian of this step runs systemd in a container with the host's network, so the unit
# starts as on a host, with its user and its restrictions.
deb() {
  install debootstrap:debootstrap curl:curl systemd-nspawn:systemd-container
  local debian=$work/debian package port admin engine
  package=$(ls "$dist"/pdproxy_*_"$arch".deb)
  if [ ! -e "$debian/etc/ready" ]; then
    rm -rf "$debian" && mkdir -p "$debian"
    debootstrap --variant=minbase --include=systemd,dbus,procps "$(. /etc/os-release && echo "$VERSION_CODENAME")" "$debian" >"$work/debootstrap.log" 2>&1 || fail "debootstrap: $(tail -n 20 "$work/debootstrap.log")"
    touch "$debian/etc/ready"
  fi
  chroot "$debian" dpkg --purge pdproxy >/dev/null 2>&1
  cp "$package" "$debian/pdproxy.deb"
  chroot "$debian" dpkg -i /pdproxy.deb >"$work/dpkg.log" 2>&1 || fail "dpkg -i: $(cat "$work/dpkg.log")"
  chroot "$debian" getent passwd pdproxy >/dev/null || fail "the package made no user"
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
dpkg -i --force-confdef /pdproxy.deb
grep -q 127.0.0.1:$port /etc/pdproxy/config.toml
until [ "\$(systemctl show --value --property=MainPID pdproxy.service)" != "\$former" ]; do sleep 0.1; done
systemctl is-active pdproxy.service
systemctl reload pdproxy.service
touch /upgraded
until [ -e /remove ]; do sleep 0.1; done
dpkg --remove pdproxy
! systemctl is-active --quiet pdproxy.service
dpkg --purge pdproxy
[ ! -e /etc/pdproxy/config.toml ]
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
  rm -rf "$work/rpm" && mkdir -p "$work/rpm"
  rpm --root "$work/rpm" --nodeps --noscripts --ignorearch -i "$package" 2>"$work/rpm.log" || fail "rpm -i: $(cat "$work/rpm.log")"
  "$work/rpm/usr/bin/pdproxy" version | grep -q "^pdproxy $version " || fail "the .rpm has another binary"
}

for name in "${steps[@]}"; do
  if [ $# = 0 ] || [[ " $* " == *" $name "* ]]; then
    case $name in rpm) rpm_package ;; *) "$name" ;; esac
    echo "ok: $name"
  fi
done
