// Package takeover tests that clients do not notice when one process of the
// proxy takes over from another. It replaces the built program again and again
// while requests of every protocol run, and none of them may fail.
package takeover
