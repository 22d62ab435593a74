// Package acme tests certificates from an ACME server: the built program, with the
// configuration of an operator, in front of Pebble, the test server of Let's Encrypt. Pebble
// finds the names in a DNS server of its own, and checks them at the ports of the proxy.
package acme
