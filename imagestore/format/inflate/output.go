package inflate

// output is the destination of a decoder.
type output struct {
	buf []byte
	pos int // of the next byte
}

// repeat appends length bytes from distance before pos.
func (w *output) repeat(distance, length int) {
	at := w.pos
	to := w.buf[at : at+length]
	w.pos += length
	// Source and destination may overlap: each copy doubles the source.
	for done := 0; done < length; {
		done += copy(to[done:], w.buf[at-distance:at+done])
	}
}
