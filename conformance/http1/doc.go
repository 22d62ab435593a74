// Package http1 compares how HTTP/1.1 servers read the same bytes: the server of the proxy, with
// each value of server.http1, net/http, and llhttp, the strict parser of Node. The proxy stands
// behind and in front of such servers. If two of them see the end of a request at different places,
// a client can smuggle one request inside another. So the tests check one property: a request that
// the proxy accepts is the same request, with the same body and the same end, for net/http and for
// llhttp. The proxy may refuse more.
//
// The tests find the right result without the proxy's parser:
//
//   - testdata/streams.txt has named streams, with the outcome of each at the proxy.
//   - A mutator of requests (mutator_test.go) makes streams from a seed. HTTP1_STREAMS sets how
//     many streams the test compares, and HTTP1_SEED sets the first seed. make fuzz-http1
//     compares 600,000.
//   - Each stream arrives whole, split at every byte, or in random pieces.
//   - The tests of behaviour run the built program, with engines that record their requests
//     byte for byte.
//
// llhttp comes as WebAssembly inside the npm package undici, which the tests install.
package http1
