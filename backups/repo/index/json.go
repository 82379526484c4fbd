package index

import (
	"errors"
	"io"
	"math"

	"drover.io/drover/api"
)

// Bounds of the JSON of an index file.
const (
	windowSize = 64 << 10
	tokenLimit = 128 // longest string or number that has a meaning here
	depthLimit = 16
)

// scanner reads JSON from a stream through a window of fixed size. The first failure ends the scan: after that every
// method returns at once, and err has the failure.
type scanner struct {
	from   io.Reader
	window []byte
	at     int
	token  []byte
	err    error
}

func newScanner(from io.Reader) *scanner {
	return &scanner{from: from, window: make([]byte, 0, windowSize), token: make([]byte, 0, tokenLimit)}
}

func (s *scanner) fail(format string, args ...any) {
	if s.err == nil {
		s.err = api.Errorf(api.Corrupt, format, args...)
	}
}

// peek returns the next byte, or 0 at the end of the stream and after a failure.
func (s *scanner) peek() byte {
	for s.at == len(s.window) {
		if s.err != nil {
			return 0
		}
		n, err := s.from.Read(s.window[:cap(s.window)])
		s.window, s.at = s.window[:n], 0
		if err != nil && n == 0 {
			if errors.Is(err, io.EOF) {
				s.fail("the JSON ends too early")
			} else {
				s.err = err
			}
		}
	}
	return s.window[s.at]
}

func (s *scanner) next() byte {
	c := s.peek()
	if s.at < len(s.window) {
		s.at++
	}
	return c
}

// peekToken skips white space.
func (s *scanner) peekToken() byte {
	for {
		switch c := s.peek(); c {
		case ' ', '\t', '\r', '\n':
			s.at++
		default:
			return c
		}
	}
}

func (s *scanner) expect(want byte) {
	if c := s.peekToken(); s.err == nil && c != want {
		s.fail("the JSON has %q instead of %q", c, want)
	}
	s.next()
}

// expectEnd refuses anything but white space until the end of the stream.
func (s *scanner) expectEnd() {
	if s.err != nil {
		return
	}
	for {
		for _, c := range s.window[s.at:] {
			if c != ' ' && c != '\t' && c != '\r' && c != '\n' {
				s.fail("the JSON has bytes behind its end")
				return
			}
		}
		n, err := s.from.Read(s.window[:cap(s.window)])
		s.window, s.at = s.window[:n], 0
		if err != nil && n == 0 {
			if !errors.Is(err, io.EOF) {
				s.err = err
			}
			return
		}
	}
}

// text returns a string, valid until the next call. An escape is refused: no text with a meaning here has any.
func (s *scanner) text() []byte {
	s.expect('"')
	s.token = s.token[:0]
	for s.err == nil {
		for i, c := range s.window[s.at:] {
			if c == '"' || c == '\\' || c < ' ' {
				if c != '"' {
					s.fail("the JSON has a string with the byte %d where a plain one is expected", c)
				}
				s.appendToken(i)
				s.next()
				return s.token
			}
		}
		s.appendToken(len(s.window) - s.at)
		s.peek()
	}
	return nil
}

// appendToken moves n bytes of the window into the token.
func (s *scanner) appendToken(n int) {
	if len(s.token)+n > tokenLimit {
		s.fail("the JSON has a string of more than %d bytes where a short one is expected", tokenLimit)
		n = 0
	}
	s.token = append(s.token, s.window[s.at:s.at+n]...)
	s.at += n
}

// number returns an unsigned integer of 32 bits.
func (s *scanner) number() uint32 {
	var v uint64
	digits := 0
	for c := s.peekToken(); '0' <= c && c <= '9' && s.err == nil; c = s.peek() {
		v = v*10 + uint64(c-'0')
		if digits++; v > math.MaxUint32 || digits > 10 || digits > 1 && v < 10 {
			s.fail("the JSON has a number that is no integer below 2^32")
		}
		s.at++
	}
	if digits == 0 {
		s.fail("the JSON has %q instead of a number", s.peek())
	}
	return uint32(v)
}

// object calls field with each key of an object, which consumes the value.
func (s *scanner) object(field func(key []byte)) {
	s.list('{', '}', func() {
		key := s.text()
		s.expect(':')
		if s.err == nil {
			field(key)
		}
	})
}

// array calls element for each element of an array, which consumes the element. null is an empty array, as Go writes
// one.
func (s *scanner) array(element func()) {
	if s.peekToken() == 'n' {
		s.skipWord("null")
		return
	}
	s.list('[', ']', element)
}

func (s *scanner) list(open, end byte, element func()) {
	s.expect(open)
	if s.peekToken() == end {
		s.next()
		return
	}
	for s.err == nil {
		element()
		if s.peekToken() != ',' {
			s.expect(end)
			return
		}
		s.next()
	}
}

func (s *scanner) skipWord(word string) {
	s.peekToken()
	for i := range len(word) {
		if c := s.next(); c != word[i] {
			s.fail("the JSON has %q in the word %s", c, word)
		}
	}
}

// skip consumes a value of an unknown field.
func (s *scanner) skip(depth int) {
	if depth > depthLimit {
		s.fail("the JSON is nested more than %d deep", depthLimit)
		return
	}
	switch c := s.peekToken(); {
	case c == '{':
		s.list('{', '}', func() {
			s.skipText()
			s.expect(':')
			s.skip(depth + 1)
		})
	case c == '[':
		s.list('[', ']', func() { s.skip(depth + 1) })
	case c == '"':
		s.skipText()
	case c == 't':
		s.skipWord("true")
	case c == 'f':
		s.skipWord("false")
	case c == 'n':
		s.skipWord("null")
	case c == '-' || '0' <= c && c <= '9':
		for s.err == nil && (c == '-' || c == '+' || c == '.' || c == 'e' || c == 'E' || '0' <= c && c <= '9') {
			s.next()
			c = s.peek()
		}
	default:
		s.fail("the JSON has %q instead of a value", c)
	}
}

func (s *scanner) skipText() {
	s.expect('"')
	for s.err == nil {
		switch s.next() {
		case '"':
			return
		case '\\':
			s.next()
		}
	}
}
