package repo

import (
	"crypto/rand"
	"encoding/binary"
	"math/bits"
)

// polynomial is a polynomial over GF(2); bit i is the coefficient of x^i. restic cuts files into chunks with the one in
// config; Drover never does, but somebody may back up files into the repository with restic.
type polynomial uint64

const polynomialDegree = 53 // a prime, which isIrreducible relies on

// randomPolynomial draws an irreducible polynomial; one candidate in 27 is irreducible.
func randomPolynomial() polynomial {
	for {
		var b [8]byte
		_, _ = rand.Read(b[:]) // never fails
		f := polynomial(binary.LittleEndian.Uint64(b[:]))&(1<<polynomialDegree-1) | 1<<polynomialDegree | 1
		if f.isIrreducible() {
			return f
		}
	}
}

func (f polynomial) degree() int { return bits.Len64(uint64(f)) - 1 }

// isIrreducible is Rabin's test. f divides x^(2^53) - x just if each factor of f is irreducible, occurs once, and has a
// degree that divides 53: the degree 53, or 1. Only x and x+1 have degree 1, too few for a product of degree 53, so
// that Rabin's second condition always holds here.
func (f polynomial) isIrreducible() bool {
	if f.degree() != polynomialDegree {
		return false
	}
	const x = polynomial(2)
	power := x // x^(2^i) modulo f
	for range polynomialDegree {
		power = multiplyModulo(power, power, f)
	}
	return power == x
}

func multiplyModulo(a, b, f polynomial) (product polynomial) {
	for ; b != 0; b >>= 1 {
		if b&1 != 0 {
			product ^= a
		}
		if a <<= 1; a.degree() == f.degree() {
			a ^= f
		}
	}
	return product
}
