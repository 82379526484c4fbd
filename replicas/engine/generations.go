package engine

// generations count the operations in progress by the moment of their begin, so that a caller can wait for the
// operations of a moment, and for no later ones. Loop thread.
type generations []generation

type generation struct {
	gen  int64
	n    int
	then []func() // to call at the end of all operations of this and older generations
}

// beginOperation counts an operation in the newest generation.
func (g generations) beginOperation() int64 {
	last := &g[len(g)-1]
	last.n++
	return last.gen
}

// endOperation removes an operation from its generation.
func (g *generations) endOperation(gen int64) {
	for i := range *g {
		if (*g)[i].gen == gen {
			(*g)[i].n--
			break
		}
	}
	g.removeEmpty()
}

// callAfterOperations begins a generation, and calls fn once the operations of all former generations have ended.
func (g *generations) callAfterOperations(fn func()) int64 {
	last := &(*g)[len(*g)-1]
	last.then = append(last.then, fn)
	gen := last.gen + 1
	*g = append(*g, generation{gen: gen})
	g.removeEmpty()
	return gen
}

// removeEmpty removes the oldest generations without operations.
func (g *generations) removeEmpty() {
	for (*g)[0].n == 0 && len(*g) > 1 {
		then := (*g)[0].then
		*g = (*g)[1:]
		for _, fn := range then {
			fn()
		}
	}
}
