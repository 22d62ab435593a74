// Package docs holds the documentation and the program together. Its tests generate the
// pages of docs/reference from the program, check that the pages in the repository are
// equal to the generated pages, and check the links, tables and commands of all pages.
// `make reference` writes the generated pages.
package docs
