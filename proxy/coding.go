package proxy

import (
	"bytes"
	"compress/gzip"
	"errors"
	"net/http"
	"runtime"
	"strings"
	"sync"

	"github.com/klauspost/compress/zstd"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// acceptedCodings are the content codings that a client may put on its body.
const acceptedCodings = "gzip, zstd"

// maxWindow is the largest window of zstd that is decoded, in bytes: the one that
// every decoder is to support (RFC 8878, 3.1.1.1.2).
const maxWindow = 8 << 20

var (
	errCoding = &openai.Error{Status: 415, Code: "unsupported_content_encoding", Param: "Content-Encoding",
		Message: "the header Content-Encoding names another coding than gzip or zstd, or more than one"}
	errCoded = &openai.Error{Status: 400, Code: "bad_content_encoding", Param: "Content-Encoding",
		Message: "the request body is not what the header Content-Encoding says"}
)

// decodeBody decodes coded, the whole body as it came, into x.body.
type decodeBody func(x *exchange, coded []byte, limit int) error

// bodyCoding is how the body of a request with those header lines is decoded; nil:
// it is plain. The error is a 415.
func bodyCoding(h http.Header) (decodeBody, error) {
	lines := h["Content-Encoding"]
	if len(lines) == 0 {
		return nil, nil
	}
	coding := ""
	for name := range strings.SplitSeq(strings.Join(lines, ","), ",") {
		name = strings.ToLower(strings.TrimSpace(name))
		if name == "" || name == "identity" {
			continue
		}
		if coding != "" {
			return nil, errCoding
		}
		coding = name
	}
	switch coding {
	case "":
		return nil, nil
	case "gzip", "x-gzip":
		return (*exchange).gunzip, nil
	case "zstd":
		return (*exchange).unzstd, nil
	}
	return nil, errCoding
}

// decode replaces x.body by what it stands for, which may have limit bytes.
func (x *exchange) decode(decoded decodeBody, limit int) error {
	coded := x.body
	x.body = nil
	defer coded.Free()
	return decoded(x, coded.B, limit)
}

var gunzips = sync.Pool{New: func() any { return new(gzip.Reader) }}

func (x *exchange) gunzip(coded []byte, limit int) (err error) {
	z := gunzips.Get().(*gzip.Reader)
	defer gunzips.Put(z)
	if z.Reset(bytes.NewReader(coded)) != nil {
		return errCoded
	}
	if x.body, err = x.hold(min(4*len(coded), buffer.FirstRead)); err != nil {
		return err
	}
	return x.fill(z, 0, limit, func(error) error { return errCoded })
}

// newUnzstd makes a decoder of zstd. Its calls may run at the same time, and write into the buffer that they are given and nowhere else.
func newUnzstd() *zstd.Decoder {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(runtime.GOMAXPROCS(0)), zstd.WithDecoderMaxWindow(maxWindow),
		zstd.WithDecodeAllCapLimit(true), zstd.WithDecoderLowmem(true))
	if err != nil { // only options can be wrong
		panic(err)
	}
	return d
}

// maxBlock is the most that one block of zstd becomes, in bytes (RFC 8878, 3.1.1.2.4).
const maxBlock = 128 << 10

// mostRatio bounds the first buffer for a coded body, as a multiple of its length. A
// frame may name any size, and memory must follow the bytes that have come.
const mostRatio = 64

// unzstd decodes into a buffer of the size that the frame names, if that is likely,
// or of a guess, which it makes larger until the text fits. The decoder says in several ways that
// it does not; what tells is how much room was left.
func (x *exchange) unzstd(coded []byte, limit int) (err error) {
	size, last := max(4*len(coded), 2*maxBlock), limit+2*maxBlock
	var head zstd.Header
	if head.Decode(coded) == nil && head.HasFCS {
		if head.FrameContentSize > uint64(limit) {
			return errBodyTooLarge(int64(limit))
		}
		size = min(int(head.FrameContentSize), max(mostRatio*len(coded), 2*maxBlock))
	}
	for {
		size = min(size, last)
		if x.body, err = x.hold(size); err != nil {
			return err
		}
		room := cap(x.body.B)
		plain, err := x.s.zstd().DecodeAll(coded, x.body.B)
		switch {
		case len(plain) > limit:
			return errBodyTooLarge(int64(limit))
		case err == nil:
			x.body.Set(plain)
			return nil
		case room >= last, !errors.Is(err, zstd.ErrDecoderSizeExceeded) && len(plain)+maxBlock <= room:
			return errCoded
		}
		x.body.Free()
		x.body, size = nil, max(4*room, 2*maxBlock)
	}
}
