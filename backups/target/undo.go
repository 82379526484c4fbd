package target

import "context"

// undoKey is the key of the function in a context.
type undoKey struct{}

// WithUndo returns a context for a Put. A store that finds the object written after the caller of Put had an error
// calls undo, maybe long after, with a store for the correction. Without undo the object is deleted, which is wrong for
// an object on which others may rely meanwhile.
func WithUndo(ctx context.Context, undo func(context.Context, Store) error) context.Context {
	return context.WithValue(ctx, undoKey{}, undo)
}

// Undo undoes a Put with the context ctx that succeeded after its caller had an error: by the function of WithUndo, or
// by the deletion of the object.
func Undo(ctx context.Context, s Store, name string) error {
	if undo, ok := ctx.Value(undoKey{}).(func(context.Context, Store) error); ok {
		return undo(context.WithValue(ctx, undoKey{}, nil), s)
	}
	return s.Delete(ctx, name)
}
