package http1

// Refusal is why the server refuses the head of a request.
type Refusal uint8

// Refusals. The number in a comment is the status of the answer.
const (
	Malformed      Refusal = iota + 1 // 400: the head is not HTTP
	BadLine                           // 400: a line is folded, or does not end in CRLF
	BadName                           // 400: a name with a space
	NoHost                            // 400: HTTP/1.1 without a Host line
	BadHost                           // 400: the Host line is no host
	UnclearLength                     // 400: two servers could see different ends of the body
	HeadTooLarge                      // 431: longer than Server.HeadLimit
	BadExpectation                    // 417: Expect is not 100-continue
	UnknownCoding                     // 501: Transfer-Encoding is not chunked
	UnknownMethod                     // 501: a method that is in no standard
	UnknownVersion                    // 505: neither HTTP/1.0 nor HTTP/1.1
)

// Error implements error.
func (r Refusal) Error() string { return refusalTexts[r] }

var refusalTexts = [...]string{
	Malformed:      "malformed head",
	BadLine:        "malformed line",
	BadName:        "malformed name",
	NoHost:         "no Host line",
	BadHost:        "malformed Host line",
	UnclearLength:  "unclear length of the body",
	HeadTooLarge:   "head too large",
	BadExpectation: "unknown expectation",
	UnknownCoding:  "unknown transfer coding",
	UnknownMethod:  "unknown method",
	UnknownVersion: "unknown version",
}
