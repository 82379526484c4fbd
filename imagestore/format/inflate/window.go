package inflate

// Window is where a decoder writes: a buffer, or a ring in which what it may refer to stays in place.
type Window struct {
	B   []byte
	Pos int // of the next byte
	// Stop is where Next comes back as full: one beyond B, for data that may end with B, or a place in a ring. What is
	// begun before it may go on behind it.
	Stop int
	// Have is how many bytes before B may be referred to; they are at the end of the ring. With those before Pos that may
	// not be, it is negative.
	Have int
	Ring int // the size of the ring: B is longer than that and what one symbol and its overshoot take
}

// end is how far a stored block may go.
func (w *Window) end() int { return min(w.Stop, len(w.B)) }

// repeat appends length bytes that start distance before Pos.
func (w *Window) repeat(distance, length int) {
	to := w.B[w.Pos : w.Pos+length]
	w.Pos += length
	from := w.Pos - length - distance
	if from < 0 {
		// What is beyond the end is at the front.
		from += w.Ring
		n := copy(to, w.B[from:w.Ring])
		to, from = to[n:], 0
	}
	// It may overlap what it makes: double what is there until it is long enough.
	at := w.Pos - len(to)
	for done := 0; done < len(to); {
		done += copy(to[done:], w.B[from:at+done])
	}
}
