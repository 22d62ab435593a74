package accesslog

import (
	"cmp"
	"strconv"
)

// commonTime is the time of the common log format, for time.Format.
const commonTime = "[02/Jan/2006:15:04:05 -0700]"

// appendCommon appends the line of e in the common log format of Apache's httpd, "%h %l %u %t \"%r\" %>s
// %b": address, "-", name of the API key, time, request line, status and bytes of the answer's body
// ("-" for none). Source: modules/loggers/mod_log_config.c of httpd.
func (e *Entry) appendCommon(line []byte) []byte {
	line = appendEscaped(line, cmp.Or(e.ClientAddress, "-"))
	line = append(line, " - "...)
	line = appendEscaped(line, cmp.Or(e.Client, "-"))
	line = append(line, ' ')
	line = e.Time.AppendFormat(line, commonTime)
	line = append(line, ` "`...)
	line = appendEscaped(line, e.Method)
	line = append(line, ' ')
	line = appendEscaped(line, e.Path)
	line = append(line, ' ')
	line = appendEscaped(line, e.Protocol)
	line = append(line, `" `...)
	line = appendNumber(line, int64(e.Status))
	line = append(line, ' ')
	line = appendNumber(line, e.BytesOut)
	return append(line, '\n')
}

// appendNumber appends a number, or "-" for 0.
func appendNumber(line []byte, n int64) []byte {
	if n == 0 {
		return append(line, '-')
	}
	return strconv.AppendInt(line, n, 10)
}

// appendEscaped appends a text so that a program can still split the line: a quote and a backslash
// follow a backslash, and spaces and bytes that are no printable ASCII become \xhh.
func appendEscaped(line []byte, text string) []byte {
	const hex = "0123456789abcdef"
	for i := range len(text) {
		switch c := text[i]; {
		case c == '"' || c == '\\':
			line = append(line, '\\', c)
		case c <= ' ' || c >= 0x7f:
			line = append(line, '\\', 'x', hex[c>>4], hex[c&15])
		default:
			line = append(line, c)
		}
	}
	return line
}
