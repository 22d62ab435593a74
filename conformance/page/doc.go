// Package page opens the dashboard of the admin address in Chromium, in front of the built
// pdproxy binary and simulated engines in separate processes. With -screenshots, it writes
// the pictures of docs/howto/dashboard.md.
//
// It is a separate module, because the product does not need its dependencies.
package page
