// Package chaos proves that what happens to one process, host or link of a fleet
// is the trouble of nobody else: hosts with networks of their own are built, every
// role is killed, stopped, cut off and delayed in turn while clients ask, and each
// answer is compared with what one engine alone says.
package chaos
