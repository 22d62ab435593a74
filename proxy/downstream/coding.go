package downstream

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

var (
	errCoding = openai.NewFieldError(openai.CodeUnsupportedContentEncoding, "Content-Encoding", "the header Content-Encoding names a coding other than gzip or zstd, or more than one")
	errCoded  = openai.NewFieldError(openai.CodeBadContentEncoding, "Content-Encoding", "the request body does not match the header Content-Encoding")
)

// AcceptedCodings are the content codings that a request body may have.
const AcceptedCodings = "gzip, zstd"

// decoder decodes coded, the whole received body, into c.body.
type decoder func(c *Client, coded []byte, limit int) error

// decoderOf returns the decoder of a request with those header lines; nil: its body is
// not coded. The error is a 415.
func decoderOf(h http.Header) (decoder, error) {
	coding := ""
	for name := range strings.SplitSeq(strings.Join(h["Content-Encoding"], ","), ",") {
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
		return (*Client).gunzip, nil
	case "zstd":
		return (*Client).unzstd, nil
	}
	return nil, errCoding
}

// decode replaces c.body by its decoded form of at most limit bytes.
func (c *Client) decode(by decoder, limit int) error {
	coded := c.body
	c.body = nil
	defer coded.Free()
	return by(c, coded.B, limit)
}

var gunzips = sync.Pool{New: func() any { return new(gzip.Reader) }}

func (c *Client) gunzip(coded []byte, limit int) (err error) {
	z := gunzips.Get().(*gzip.Reader)
	defer gunzips.Put(z)
	if z.Reset(bytes.NewReader(coded)) != nil {
		return errCoded
	}
	if c.body, err = c.Buffer(min(4*len(coded), buffer.FirstRead)); err != nil {
		return err
	}
	return c.fill(z, 0, limit, func(error) error { return errCoded })
}

// maxBlock is the most that one block of zstd becomes, in bytes (RFC 8878, 3.1.1.2.4).
const maxBlock = 128 << 10

// maxRatio bounds the first buffer for a coded body, as a multiple of its length. A
// frame may name any size, and memory must follow the bytes that have come.
const maxRatio = 64

// unzstd decodes into a buffer of the size that the frame names, if that size is likely. Otherwise
// unzstd chooses a size, and makes the buffer larger until the text fits. The decoder has several
// errors for a buffer that is too small. The remaining room in the buffer distinguishes these
// errors from others.
func (c *Client) unzstd(coded []byte, limit int) (err error) {
	size, last := max(4*len(coded), 2*maxBlock), limit+2*maxBlock
	var head zstd.Header
	if head.Decode(coded) == nil && head.HasFCS {
		if head.FrameContentSize > uint64(limit) {
			return errBodyTooLarge(int64(limit))
		}
		size = min(int(head.FrameContentSize), max(maxRatio*len(coded), 2*maxBlock))
	}
	for {
		size = min(size, last)
		if c.body, err = c.Buffer(size); err != nil {
			return err
		}
		room := cap(c.body.B)
		plain, err := c.bodies.zstd().DecodeAll(coded, c.body.B)
		switch {
		case len(plain) > limit:
			return errBodyTooLarge(int64(limit))
		case err == nil:
			c.body.Set(plain)
			return nil
		case room >= last, !errors.Is(err, zstd.ErrDecoderSizeExceeded) && len(plain)+maxBlock <= room:
			return errCoded
		}
		c.body.Free()
		c.body, size = nil, max(4*room, 2*maxBlock)
	}
}

// maxWindow is the largest window of zstd that is decoded, in bytes: the one that
// every decoder must support (RFC 8878, 3.1.1.1.2).
const maxWindow = 8 << 20

// newUnzstd makes a decoder of zstd. Its calls may run at the same time, and write only
// into the buffers that they get.
func newUnzstd() *zstd.Decoder {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(runtime.GOMAXPROCS(0)), zstd.WithDecoderMaxWindow(maxWindow),
		zstd.WithDecodeAllCapLimit(true), zstd.WithDecoderLowmem(true))
	if err != nil { // only wrong options fail
		panic(err)
	}
	return d
}
