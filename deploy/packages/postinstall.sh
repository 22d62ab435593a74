#!/bin/sh
# Debian calls it with "configure" and the former version, RPM with the number of installed
# versions: 1 for the first installation, 2 for an upgrade.
set -e

if ! getent passwd pdproxy >/dev/null; then
	if command -v systemd-sysusers >/dev/null; then
		systemd-sysusers /usr/lib/sysusers.d/pdproxy.conf
	else
		getent group pdproxy >/dev/null || groupadd --system pdproxy
		useradd --system --gid pdproxy --home-dir /nonexistent --no-create-home --shell /usr/sbin/nologin pdproxy
	fi
fi

# In a container or chroot, no systemd runs.
[ -d /run/systemd/system ] || exit 0
systemctl daemon-reload
case "$1:$2" in
configure: | 1:) exit 0 ;; # the first installation: the administrator writes the configuration, then enables the unit
esac
# USR2: the new program takes over, and no request fails. If it cannot start, the former
# program goes on.
if systemctl is-active --quiet pdproxy.service; then
	systemctl kill --kill-whom=main --signal=USR2 pdproxy.service
fi
