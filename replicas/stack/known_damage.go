package stack

// Knows sets the known damage of a layer in an open replica: reads of the damage fail from now on.
func (r *Replica) Knows(uid string, list []Damage) error {
	return r.nameError(r.onLoop(func() {
		for _, l := range r.layers {
			if l.Rec.UID == uid && l.Hydration == nil {
				l.Damage = list
			}
		}
	}))
}
