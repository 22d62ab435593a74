// Package takeover proves that clients do not notice when one process of the
// proxy takes over from another: the built program is replaced over and over
// while requests of every protocol run, and not one of them fails.
package takeover
