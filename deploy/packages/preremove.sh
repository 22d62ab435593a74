#!/bin/sh
# Debian calls it with "remove" or "upgrade", RPM with the number of versions that remain.
set -e
case "$1" in
remove | 0) ;;
*) exit 0 ;;
esac
[ -d /run/systemd/system ] || exit 0
systemctl disable --now pdproxy.service
systemctl stop 'pdproxy-sidecar@*.service'
